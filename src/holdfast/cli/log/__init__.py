"""`holdfast log`: data directories inspected, verified, dumped and followed."""
