"""The schedulers that can start a retraining: systemd, cron, Kubernetes, GitHub and GitLab."""
