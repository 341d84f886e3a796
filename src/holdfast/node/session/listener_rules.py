"""Rules of one listener for its clients."""

from typing import Final

PASSWORD: Final = "password"
SCRAM: Final = "scram"
CERTIFICATE: Final = "certificate"
"""The ways in which a client proves its user name."""


class ListenerRules:
    """Limits and rights of a listener, beside those of the node.

    Its connections share one object. A reload changes it in place, so that the rules of now apply
    to the clients of then. A connection keeps its mount, because its session has filters with it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # None: NodeConfig.allow_anonymous.
        self.allow_anonymous: bool | None = None
        # Empty: each one that the node is configured for.
        self.authentication: tuple[str, ...] = ()
        # security.passwords.PasswordFile: the only users of this listener with a password. None:
        # those of the node.
        self.passwords: object | None = None
        # security.acl.RuleSource: the rights of this listener's clients. None: NodeState.acl.
        self.acl: object | None = None
        # The only names that TLS proves here. None: each one in a certificate that it accepts.
        self.certified: frozenset[str] | None = None
        # The prefix of all topics of the listener's clients, which they do not see.
        self.mount = b""
        # 0: NodeConfig.packet_bytes_max.
        self.packet_bytes_max = 0
        # The kind of listener, by which a client finds one on another node that it can use.
        self.kind = ""

    def takes(self, method: str) -> bool:
        """Whether a client may prove its user name in this way."""
        return not self.authentication or method in self.authentication

    def is_certificate_only(self) -> bool:
        """Whether a certificate decides on its own. The name and the password of CONNECT then mean
        nothing, as with `use_identity_as_username` of Mosquitto."""
        return self.authentication == (CERTIFICATE,)

    def certifies(self, name: str) -> bool:
        """Whether a name that TLS has proved counts here now."""
        return self.takes(CERTIFICATE) and (self.certified is None or name in self.certified)
