"""Frames between the broker's process and its I/O workers, and the credit by which each side bounds
what the other one sends for a connection. Internal to one build: both processes run the same
program, so it is no promise.
"""
