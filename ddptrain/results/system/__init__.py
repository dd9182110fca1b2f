"""The file of system metrics of a run, and what is shown of it."""
