"""The forms in which others read a table: a directory, Delta Lake, Iceberg."""
