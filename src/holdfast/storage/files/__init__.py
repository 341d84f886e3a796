"""The files of a data directory: names, locks, and the file system below the log.

`filesystem` is the one place that calls the operating system, so tests and the simulator replace it
by a disk that crashes, tears writes and fills up.
"""
