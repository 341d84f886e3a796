"""Replication of partitions: the leader's side, the follower's side, catching up.

A follower acknowledges a batch when it is on its disk. Logs are brought together by epoch, never by
watermark (`log_matching`).
"""
