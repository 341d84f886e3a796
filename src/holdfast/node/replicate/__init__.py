"""Replication of partitions: the leader's side, the follower's side, catching up.

A follower acknowledges a batch when it is on its disk. Logs are compared by epoch, never by high
watermark (`log_matching`).
"""
