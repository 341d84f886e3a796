"""Failure detection: heartbeats, suspicion, the health of disks, the agreed clock."""
