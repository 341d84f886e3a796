"""The readers of raw batches, from admin ports or files, and the proof that none is missing."""
