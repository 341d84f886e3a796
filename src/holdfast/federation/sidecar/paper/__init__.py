"""Federator of the published protocol: a client of its own and its neighbours' brokers."""
