"""Remembers the rights of one client by topic."""

from typing import Final

from holdfast.node.session.listener_rules import ListenerRules
from holdfast.security.acl import ClientRules

TOPICS_BYTES_MAX: Final = 1 << 20
"""The most bytes of topics that are remembered for one client, in each direction."""
DOLLAR: Final = 0x24
TOPIC_BYTES: Final = 100
"""The memory in bytes for one remembered topic, without its name."""


class Rights:
    """The rights of one client, remembered by topic. The rules do not change while it lives,
    except those of a service that is asked about each topic (`topic_rights`)."""

    def __init__(
        self,
        acl: ClientRules | None,
        mount: bytes,
        listener: ListenerRules | None = None,
        *,
        is_given: bool = False,
        acts_for: tuple[str | None, str] | None = None,
    ) -> None:
        """`acl` None: everything below the `mount`, the prefix of the client's topics. `listener`:
        that of the client's last connection; None: it has no rights of its own. `is_given`: the
        rules came with the client's proof of identity, and end with its next connection.
        `acts_for`: the user and client id to which the rights belong, if not to the client."""
        self.acl = acl
        self.listener = listener
        self.is_given = is_given
        self.acts_for = acts_for
        self.mount = mount
        # Made on first use: most clients only read, or only write.
        self.reads: dict[bytes, bool] | None = None
        self.reads_bytes = 0
        self.writes: dict[bytes, bool] | None = None
        self.writes_bytes = 0

    def _has_below(self, raw: bytes) -> bool:
        """Whether the mount has the topic, under a name that its clients may see: not an empty one
        [MQTT-4.7.3-1], and none with `$` in front, which `#` must not match [MQTT-4.7.2-1]. With a
        mount `guests/`, `guests/$SYS/broker/version` would look like a topic of the broker."""
        size = len(self.mount)
        if not size:
            return True
        return raw.startswith(self.mount) and len(raw) > size and raw[size] != DOLLAR

    def learn_read(self, raw: bytes) -> bool:
        """Looks up whether the client may read a topic, and remembers the result."""
        acl = self.acl
        allowed = self._has_below(raw) and (acl is None or acl.can_read(raw.decode()))
        self.reads_bytes += len(raw) + TOPIC_BYTES
        if self.reads is None or self.reads_bytes > TOPICS_BYTES_MAX:
            self.reads = {}
            self.reads_bytes = len(raw) + TOPIC_BYTES
        self.reads[raw] = allowed
        return allowed

    def forget_write(self, raw: bytes) -> None:
        """Looks the right to write a topic up again at the next message."""
        if self.writes is not None and self.writes.pop(raw, None) is not None:
            self.writes_bytes -= len(raw) + TOPIC_BYTES

    def forget_writes(self) -> None:
        """Looks the rights to write all topics up again."""
        self.writes = None
        self.writes_bytes = 0

    def learn_write(self, raw: bytes, topic: str) -> bool:
        """Looks up whether the client may write a topic, and remembers the result."""
        acl = self.acl
        allowed = self._has_below(raw) and (acl is None or acl.can_write(topic))
        self.writes_bytes += len(raw) + TOPIC_BYTES
        if self.writes is None or self.writes_bytes > TOPICS_BYTES_MAX:
            self.writes = {}
            self.writes_bytes = len(raw) + TOPIC_BYTES
        self.writes[raw] = allowed
        return allowed
