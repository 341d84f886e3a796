"""Proof of identity that a source accepted for one connection, until it expires."""

from holdfast.security.identity.identity import ClientIdentity


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
