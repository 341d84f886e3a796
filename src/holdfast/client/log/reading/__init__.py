"""Reads raw batches from admin ports or files, and proves that none is missing."""
