"""Where workers come from: an embedded local cluster, or one that is already up."""
