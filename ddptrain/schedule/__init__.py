"""`ddptrain schedule`: entries for cron and systemd, and the check for late models."""
