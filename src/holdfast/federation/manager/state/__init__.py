"""The manager's state, its changes, and the databases that keep it."""
