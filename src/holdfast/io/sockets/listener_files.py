"""Files of one listener: its certificates, its users and its rights."""

import ssl
from math import inf

from msgspec import Struct

from holdfast.security.acl import RuleSource
from holdfast.security.passwords import PasswordFile


class ListenerFiles(Struct, frozen=True):
    """The loaded files of one listener."""

    context: ssl.SSLContext | None = None
    """The context of TLS; None: the listener has neither a certificate nor pre-shared keys."""
    identities: frozenset[str] | None = None
    """The identities of the pre-shared keys; None: there are none."""
    passwords: PasswordFile | None = None
    """The only users of this listener with a password; None: those of the broker."""
    acl: RuleSource | None = None
    """The rights of this listener's clients; None: those of the broker."""
    revoked_until: float = inf
    """The end of the first revocation list to end, in seconds since 1970. OpenSSL refuses all
    clients of its CA from then on."""
