"""Inbound messages: checks, the append, the steps after the commit, producers' sequences."""
