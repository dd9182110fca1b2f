"""Reading, decoding and batching of images."""
