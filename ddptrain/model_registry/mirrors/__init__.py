"""Mirrors: other registries that get the versions with an alias. Their problems have no effect on this one."""
