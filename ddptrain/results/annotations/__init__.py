"""Tags and notes that users add to runs."""
