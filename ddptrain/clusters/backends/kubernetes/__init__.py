"""Clusters of pods, through dask-kubernetes' operator."""
