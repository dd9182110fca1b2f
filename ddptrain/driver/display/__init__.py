"""What `ddptrain train` shows while it runs: the log of every rank, and its progress."""

from ddptrain.driver.display.display import Display, open_display
from ddptrain.driver.display.renderers import RunDisplay

__all__ = ["Display", "RunDisplay", "open_display"]
