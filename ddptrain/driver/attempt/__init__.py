"""One attempt of a run: the pure state machine, and the loop that feeds it messages and executes its actions."""
