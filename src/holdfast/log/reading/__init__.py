"""Reads the log: indexes, cursors, and scans of segment files."""
