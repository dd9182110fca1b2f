"""Records steps with torch.profiler."""
