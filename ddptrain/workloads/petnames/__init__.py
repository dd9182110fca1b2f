"""Pet names, one character at a time, by an LSTM: train on a list of names, then generate new ones."""
