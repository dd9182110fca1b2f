"""ctx.loader, and the worker processes of DataLoaders."""
