"""Event loop of a node: turns, timers, descriptors and unexpected exceptions."""
