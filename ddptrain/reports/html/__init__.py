"""The report page: one HTML file with everything about runs, a sweep or a model, for a browser without network."""
