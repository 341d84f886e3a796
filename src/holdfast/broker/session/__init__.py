"""One client's protocol state. Pure: no clock, no socket, no log access."""
