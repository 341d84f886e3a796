"""Runs commands of dynamic security at a node, and changes its users."""
