"""`ddptrain schedule`: entries for cron, systemd, Kubernetes and CI, and the check for missed runs."""
