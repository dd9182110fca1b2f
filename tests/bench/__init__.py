"""`make bench`: ddptrain and its peers, measured alternately, with the goals of the project."""
