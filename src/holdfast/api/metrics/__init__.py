"""Prometheus metrics of a node, its cluster and its federation, made when they are collected."""
