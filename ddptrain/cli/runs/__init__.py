"""Commands of `ddptrain results` that select, mark, compare and export runs."""
