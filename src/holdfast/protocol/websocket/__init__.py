"""MQTT over WebSocket, for both sides. MQTT 5.0, section 6; RFC 6455.

`frames` is the framing, `stream` connects it with a socket and the protocol that would otherwise
own the socket. `client.transport.websocket` and `io.sockets.websocket` add the two halves of
the upgrade.
"""
