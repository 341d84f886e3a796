"""Retained messages of the whole federation: versions, and how members agree on the newest."""
