"""Writes the log: open batches, segments, recovery, retention.

Readers outside the broker, such as Spark, import none of it.
"""
