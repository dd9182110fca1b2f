"""What trackers have made of a run."""
