"""Stores custody, positions and identity of a member on disk."""
