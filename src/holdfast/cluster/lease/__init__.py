"""Mastership on shared storage: who of several nodes on one directory may write its log.

`directory` has the files and their formats, `watch` a standby's judgement of the holder, `tenure`
the holder's of itself, `claim` the steps of a takeover. All of it works on a FileSystem and takes
the time as an argument.
"""
