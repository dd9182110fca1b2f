"""What `ddptrain train` shows while it runs: every rank's log, and how far each rank is."""

from ddptrain.driver.display.display import Display, open_display

__all__ = ["Display", "open_display"]
