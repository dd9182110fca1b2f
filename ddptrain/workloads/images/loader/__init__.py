"""Reads, decodes and batches images ahead of the training."""
