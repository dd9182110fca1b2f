"""Stand-ins for packages that older code imports: changing the import is all that it takes to run here."""
