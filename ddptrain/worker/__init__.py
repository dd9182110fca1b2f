"""Inside a Dask worker: start ranks, carry their output, stop them. No training runs in this process."""
