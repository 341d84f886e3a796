"""Queues: shared subscriptions that outlive their members."""
