"""The names and signatures of `dask_pytorch_ddp` for current versions of Dask; add `ddptrain.compat.` to imports.

Modules: `dispatch` (run), `results` (DaskResultsHandler), `data` (S3ImageFolder).
"""
