"""Raft without I/O: pre-vote, election, log, snapshots. Used for the metadata only."""
