"""Links between nodes: one authenticated connection per pair, with frames both ways."""
