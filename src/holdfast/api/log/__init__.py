"""Routes about the log as people read it: records, one record, counts over time, its disk."""
