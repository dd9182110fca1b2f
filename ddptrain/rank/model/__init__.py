"""The model of a rank: precision, compilation and how the ranks share it."""
