"""Data directories of a single broker as those of a cluster's node."""
