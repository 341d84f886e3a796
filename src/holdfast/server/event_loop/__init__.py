"""The event loop's side of a node: turns, timers, descriptors, unexpected exceptions."""
