"""The forms in which other programs read a table: a directory, Delta Lake, Iceberg."""
