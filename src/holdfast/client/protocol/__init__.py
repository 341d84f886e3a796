"""The client's protocol core: bytes and calls in, bytes and effects out. No socket, no clock."""
