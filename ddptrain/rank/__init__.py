"""Inside a training process: the rank server that forks ranks, and the context that a workload sees."""
