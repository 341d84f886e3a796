"""Client connections: listeners, TCP and TLS, WebSocket, and a transport without a socket."""
