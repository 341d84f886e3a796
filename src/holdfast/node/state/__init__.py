"""The committed state: a fold of the records of the log, its snapshot and its transfer."""
