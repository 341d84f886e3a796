"""Connects a client with asyncio: dialing, sockets, WebSocket, deadlines."""
