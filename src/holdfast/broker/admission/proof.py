"""The proof of identity that a source accepted for one connection, until it expires."""

from holdfast.security.identity.identity import ClientIdentity


class Proof:
    """An identity and the timer of its end; None: it does not expire."""

    def __init__(self, identity: ClientIdentity, timer: object | None) -> None:
        self.identity = identity
        self.timer = timer
