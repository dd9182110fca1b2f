"""Replacements for packages that older code imports: only the import must be changed."""
