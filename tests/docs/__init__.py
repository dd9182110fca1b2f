"""Builds and checks the documentation: the site, the console blocks, the recording."""
