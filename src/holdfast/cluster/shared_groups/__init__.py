"""Shared subscriptions in a cluster: one cursor a group, whatever node its members are on.

The leader of a group's home partition is its coordinator; each node's agent reports the capacity of
its members and hands them the records that are assigned to it.
"""
