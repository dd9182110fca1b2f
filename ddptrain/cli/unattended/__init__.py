"""Commands for unattended use: retrain, schedule, notify, results prune."""
