"""The reading side of the log: indexes, cursors, and scans of segment files."""
