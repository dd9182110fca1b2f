"""What trackers have created for a run."""
