"""The commands of dynamic security at a node, and the users they change."""
