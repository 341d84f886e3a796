"""Transcripts: text files that say what clients did and what the production cores did then.

A *scene* (`tests/data/transcripts/scenes/`) is played in two forms: by a cluster of one and by
a cluster of three. Its file has the bytes to each client, decoded, and the
records of the log, side by side where the forms differ. A *story* (`.../stories/`) is told for
readers: each command is followed by everything that happened, frames between nodes included.

`python -m tests.transcripts --write` plays all of them and writes the files again. `commands` are
the language of both; `stage` are the nodes and `actors` the clients; `packets`, `records` and
`frames` are the lines; `scenes`, `stories` and `seeds` are the files.
"""
