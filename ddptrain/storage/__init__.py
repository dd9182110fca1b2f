"""Objects and files of any store: S3 and its like through obstore, the rest through fsspec."""
