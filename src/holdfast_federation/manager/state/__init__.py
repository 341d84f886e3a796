"""The manager's state, its changes, and the file that stores it."""
