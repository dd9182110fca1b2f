"""The list of images and its split into training and validation."""
