"""Linearizable reads: read barriers on partitions, read indexes on the metadata."""
