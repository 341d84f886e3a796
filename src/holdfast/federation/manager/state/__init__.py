"""The manager's state, its changes, and the databases that store it."""
