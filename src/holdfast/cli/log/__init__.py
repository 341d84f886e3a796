"""`holdfast log`: inspects, verifies, dumps and follows data directories."""
