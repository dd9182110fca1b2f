"""The version of ddptrain."""

__version__ = "0.1.0"
