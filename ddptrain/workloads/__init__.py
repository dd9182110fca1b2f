"""What can be trained out of the box; each workload uses nothing but the public RankContext."""
