"""Shared subscriptions in a cluster: one cursor per group, for the members on all nodes.

The leader of a group's home partition is its coordinator. Each node's agent reports the capacity of
its group members, and gives them the records that are assigned to it.
"""
