"""The disk: the journal's writer thread, Raft's files, and the lease of a shared directory."""
