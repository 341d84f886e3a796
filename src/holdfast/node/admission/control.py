"""State of admission at one node, and how its clients prove who they are."""

from holdfast.node.admission.limits import AdmissionLimits
from holdfast.node.admission.lockouts import FailureCount, LockoutTable
from holdfast.node.admission.meters import MeterTable
from holdfast.node.admission.observer import ClientObserver
from holdfast.security.enhanced_authentication import Factory
from holdfast.security.identity.identity import ClientIdentity


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


class Proof:
    """An identity and the timer of its end; None: it does not expire.

    `proves_name` False: hooks gave the rights, and a password or certificate proved the name. Such
    a client has to leave when a reload no longer has its user.
    """

    def __init__(
        self, identity: ClientIdentity, timer: object | None, *, proves_name: bool = True
    ) -> None:
        self.identity = identity
        self.proves_name = proves_name
        self.timer = timer


class AdmissionControl:
    """Limits in force, allowances in use, lock-outs and counted failures."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.checks_passwords = False
        # Messages to `$CONTROL/dynamic-security/v1` are commands.
        self.takes_commands = False
        # Users who may not connect, however they prove their names, and those that may with one
        # client id only.
        self.disabled_users: frozenset[str] = frozenset()
        self.client_ids: dict[str, str] = {}
        # Sources of identity are asked before the password file, and may bring rights.
        self.asks_sources = False
        # Hooks give rights, to clients that have proved their names.
        self.asks_rights = False
        self.observer: ClientObserver | None = None
        # Enhanced authentication by method name.
        self.authenticators: dict[str, Factory] = {}
        self.limits = limits
        self.meters = MeterTable(limits)
        self.lockouts = LockoutTable()
        self.failures = FailureCount()
        # (scope, name) of the failures to report to the other processes of the machine.
        self.reported: list[tuple[str, str]] = []
        # None: sessions are not counted.
        self.users: UserSessions | None = None
        self.counts_messages = False
        self.counts_connects = False
        self.replace(limits)

    def share(self) -> None:
        """Gathers what is to be reported to the other processes of the machine, from now on."""
        self.meters.charged = []

    def replace(self, limits: AdmissionLimits) -> None:
        """Uses other limits. The connections keep their meters until they are given others."""
        self.limits = limits
        self.meters.replace(limits)
        self.counts_messages = limits.counts_messages()
        self.counts_connects = limits.counts_connects()
        self.users = UserSessions(limits.sessions_per_user) if limits.sessions_per_user else None
