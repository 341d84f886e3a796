"""Custody, positions and identity of a member on disk."""
