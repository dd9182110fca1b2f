"""ctx.loader and the processes of DataLoaders."""
