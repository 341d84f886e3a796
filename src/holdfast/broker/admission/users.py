"""The sessions of each user at this node, for the quota of sessions."""


class UserSessions:
    """The client ids of each user's sessions."""

    def __init__(self, sessions_max: int) -> None:
        """`sessions_max`: the most sessions of one user."""
        self.sessions_max = sessions_max
        self._clients: dict[str, set[str]] = {}

    def has_room(self, username: str) -> bool:
        """Whether the user may open one more session."""
        return len(self._clients.get(username, ())) < self.sessions_max

    def enter(self, username: str, client_id: str) -> None:
        """Count a session of the user. Repeated calls count it once."""
        self._clients.setdefault(username, set()).add(client_id)

    def leave(self, username: str, client_id: str) -> None:
        """Forget a session of the user."""
        clients = self._clients.get(username)
        if clients is not None:
            clients.discard(client_id)
            if not clients:
                del self._clients[username]
