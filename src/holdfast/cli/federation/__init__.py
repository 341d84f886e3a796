"""`holdfast federation`, `holdfast federator` and `holdfast topology`."""
