"""MQTT over WebSocket, for both sides. MQTT 5.0, section 6; RFC 6455.

`frames` is the framing, `stream` puts it between a socket and the protocol that would otherwise own
the socket. `client.websocket` and `drivers.websocket` add the two halves of the upgrade.
"""
