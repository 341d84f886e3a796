"""The graph of members: link state, link health, shortest paths, who wants which topic."""
