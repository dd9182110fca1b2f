"""Models of the image workload, their weights and labels."""
