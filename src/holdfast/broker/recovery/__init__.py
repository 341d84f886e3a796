"""State of sessions and groups as records of the log, and back after a restart."""
