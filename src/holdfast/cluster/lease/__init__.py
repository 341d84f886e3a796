"""The lease of a shared directory: the right of one node to write its log.

`directory` has the files and their formats, `watch` a standby's judgement of the holder, `tenure`
the holder's judgement of itself, and `claim` the steps of a takeover. All of them work on a
FileSystem and take the time as an argument.
"""
