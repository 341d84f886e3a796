"""Graph of the members: link state, link health, shortest paths, and interest in topics."""
