"""Records steps with torch.profiler: traces, and tables of the operators that took most time."""
