"""The installed command, real processes, the run directory, `--json` and exit codes; nothing of ddptrain is imported."""
