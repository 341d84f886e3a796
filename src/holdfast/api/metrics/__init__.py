"""Prometheus metrics of a node, its cluster and its federation."""
