"""Publishes a table to other programs: as a directory, Delta Lake, or Iceberg."""
