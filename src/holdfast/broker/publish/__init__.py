"""Inbound messages: checks, the append, what follows from the commit, producers' sequences."""
