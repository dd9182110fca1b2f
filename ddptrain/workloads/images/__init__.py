"""Image classification: trains a CNN on folders of images, one folder per class, from any store."""
