"""Reads a lake's table `records`: its commits, its files and the saved states of a broker."""
