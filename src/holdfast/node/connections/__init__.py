"""Connections from CONNECT to DISCONNECT: authentication, takeover, keep alive, wills."""
