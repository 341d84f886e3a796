"""Failure detection: heartbeats, suspicion, the health of disks, the cluster clock."""
