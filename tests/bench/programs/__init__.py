"""What the benchmark runs in other processes; each file stands alone, for it is copied to where the ranks find it."""
