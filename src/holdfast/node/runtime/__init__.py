"""Runs a node's turns in order, and limits a node that is not fit to serve."""
