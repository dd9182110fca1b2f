"""Programs that the benchmark runs in other processes. Each file is independent, because it is copied for the ranks."""
