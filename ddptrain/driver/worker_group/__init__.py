"""The ranks of an attempt on a Dask cluster: reservation of slots, tasks, calls to workers."""
