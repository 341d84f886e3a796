"""The log for Python programs."""
