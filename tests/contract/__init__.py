"""The installed command, real processes, the run directory, exit codes; nothing of ddptrain is imported."""
