"""The framing between the broker's process and its I/O workers: frames, and the credit by which
each side bounds what the other one sends for a connection. Internal to one build: both processes
run the same program, so it is no promise.
"""
