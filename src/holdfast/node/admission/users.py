"""Counts the sessions of each user at this node, for the quota."""


class UserSessions:
    """The client ids of each user's sessions."""

    def __init__(self, sessions_max: int) -> None:
        """`sessions_max`: the most sessions of one user."""
        self.sessions_max = sessions_max
        self._clients: dict[str, set[str]] = {}
        # The user of each client id above.
        self._user_of: dict[str, str] = {}

    def has_room(self, username: str, client_id: str) -> bool:
        """Whether the user may open a session of this client, or has it."""
        clients = self._clients.get(username, ())
        return len(clients) < self.sessions_max or client_id in clients

    def assign(self, client_id: str, username: str | None) -> None:
        """Counts the session of this client for this user, and for no other. None or "": for no
        user."""
        before = self._user_of.pop(client_id, "")
        if before:
            clients = self._clients[before]
            clients.discard(client_id)
            if not clients:
                del self._clients[before]
        if username:
            self._user_of[client_id] = username
            self._clients.setdefault(username, set()).add(client_id)
