"""`ddptrain schedule`: entries for cron and systemd."""
