"""The model registry: versions of trained models, their aliases, and the history of every change."""
