"""The disk's side: the journal's writer thread, Raft's files, the lease of a shared directory."""
