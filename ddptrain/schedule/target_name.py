"""The names of the schedulers; the command line imports nothing else to be parsed."""

from __future__ import annotations

from enum import StrEnum


class TargetName(StrEnum):
    """The schedulers."""

    SYSTEMD = "systemd"
    CRON = "cron"
    KUBERNETES = "kubernetes"
    GITHUB = "github"
    GITLAB = "gitlab"
