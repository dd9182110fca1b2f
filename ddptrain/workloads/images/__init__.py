"""An image classifier: a CNN trained on folders of images, one a class, from any store."""
