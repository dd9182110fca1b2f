"""`dask_pytorch_ddp` with the same names and signatures, on today's Dask: write `ddptrain.compat.` before it.

Modules: `dispatch` (run), `results` (DaskResultsHandler), `data` (S3ImageFolder).
"""
