"""State of admission at one node, and how its clients prove who they are."""

from holdfast.node.admission.limits import AdmissionLimits
from holdfast.node.admission.lockouts import FailureCount, LockoutTable
from holdfast.node.admission.meters import MeterTable
from holdfast.node.admission.observer import ClientObserver
from holdfast.node.admission.users import UserSessions
from holdfast.security.enhanced_authentication import Factory


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
        # None: sessions are not counted.
        self.users: UserSessions | None = None
        self.counts_messages = False
        self.counts_connects = False
        self.replace(limits)

    def replace(self, limits: AdmissionLimits) -> None:
        """Uses other limits. The connections keep their meters until they are given others."""
        self.limits = limits
        self.meters.replace(limits)
        self.counts_messages = limits.counts_messages()
        self.counts_connects = limits.counts_connects()
        self.users = UserSessions(limits.sessions_per_user) if limits.sessions_per_user else None
