"""The lake: tables declared as data, and the engine that keeps them up to date.

A step reads the new rows of a table's source, writes files, and commits both together. So its
effect is exactly-once, at whatever point it is interrupted.
"""
