"""Backfill: the rows of some days of a lake are made again and replaced."""
