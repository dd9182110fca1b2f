"""Images and tables that a rank logs."""
