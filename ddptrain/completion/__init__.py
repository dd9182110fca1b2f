"""Answers the shell's TAB key. It imports little: neither typer nor the configuration's models, so that TAB is fast."""
