"""Files of a data directory: names, locks, and the file system below the log.

Only `filesystem` calls the operating system. So tests and the simulator replace it by a disk that
crashes, tears writes and fills up.
"""
