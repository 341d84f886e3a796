"""Why a WebSocket was not opened, or ended. Compiled modules cannot derive from OSError."""


class WebSocketError(ConnectionError):
    """A refused upgrade or a violation by the peer; the text has the reason."""
