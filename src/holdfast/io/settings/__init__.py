"""Makes the parts of a node from its configuration and its security files."""
