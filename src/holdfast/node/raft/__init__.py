"""Raft without I/O: pre-vote, election, log, snapshots. It serves the metadata only."""
