"""Lease of a shared directory: the right of one node to write its log.

The module `directory` has the files and their formats, and `claim` the steps of a takeover. A
standby judges the holder by `standby_watch`, and the holder itself by `tenure`. All of them work on
a FileSystem and take the time as an argument.
"""
