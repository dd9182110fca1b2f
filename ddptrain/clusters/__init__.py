"""Clusters: starting, finding, watching and ending the Dask clusters that runs use."""
