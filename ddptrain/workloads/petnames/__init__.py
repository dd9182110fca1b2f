"""Pet names, generated character by character by an LSTM. `train` trains it, `generate` samples new names."""
