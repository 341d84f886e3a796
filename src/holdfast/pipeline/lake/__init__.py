"""The lake: tables declared as data, and the engine that keeps them up to date.

A step reads what is new of a table's source, writes files, and commits both at once, so its effect
is exactly once wherever it dies.
"""
