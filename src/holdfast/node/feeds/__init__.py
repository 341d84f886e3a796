"""Feeds: committed records that a leader sends to nodes that do not store its partition."""
