"""The asyncio edge of a client: dialing servers, sockets, WebSocket, deadlines."""
