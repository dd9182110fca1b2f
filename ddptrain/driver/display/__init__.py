"""What `ddptrain train` shows while it runs: the log of every rank, and its progress."""

from ddptrain.driver.display.display import Display

__all__ = ["Display"]
