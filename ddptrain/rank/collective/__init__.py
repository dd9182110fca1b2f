"""ctx methods that all ranks must call."""
