"""Connections of clients: listeners, TCP, TLS, WebSocket, and one without a socket."""
