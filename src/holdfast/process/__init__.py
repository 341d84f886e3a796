"""The process: composes a broker from its data directory, its listeners and its peers.

It decides what is opened in which order. It is the only package that imports `api`, besides `cli`.
"""
