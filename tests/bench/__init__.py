"""`make bench`: ddptrain and its peers, measured side by side against the goals of the project."""
