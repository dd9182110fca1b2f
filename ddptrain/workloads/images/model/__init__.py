"""Models, weights and labels of images."""
