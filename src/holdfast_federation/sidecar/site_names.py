"""Names a federation's sites for people: logs, status and metrics show them.

Members tell apart by their ids. A name is a label that an operator gave to a member, so nothing is
decided by it: a wrong or forged one misleads a reader and no message. Each member tells its links
the names that it knows, and passes on what is new to it. A name belongs to one start of its member
(the epoch), so it changes only with a newer start, and the spreading ends: counter-example without
that, two members that know different names of a third would send them around a ring for ever.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from holdfast.config.federation import SITE
from holdfast_federation.core.frames import MEMBERS_MAX, Node, Positive

NAMES_PER_FRAME: Final = 256


class SiteName(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The name of one member since one of its starts."""

    node: Node
    epoch: Positive
    name: Annotated[str, Meta(pattern=SITE, min_length=1)]


_DECODER: Final = msgspec.msgpack.Decoder(
    Annotated[list[SiteName], Meta(max_length=NAMES_PER_FRAME)]
)
_ENCODER: Final = msgspec.msgpack.Encoder()


class SiteNames:
    """The names that one member knows, its own included."""

    def __init__(self, node: bytes, epoch: int, name: str) -> None:
        """`name`: of this member; "" for none."""
        self._own = node
        self._names: dict[bytes, SiteName] = {}
        if name:
            self._names[node] = SiteName(node, epoch, name)

    def name_of(self, node: bytes) -> str:
        """Returns the name of a member, "" if none is known."""
        known = self._names.get(node)
        return "" if known is None else known.name

    def by_id(self) -> dict[str, str]:
        """Returns all names by the members' ids in hexadecimal digits."""
        return {node.hex(): each.name for node, each in self._names.items()}

    def frames(self) -> Iterator[bytes]:
        """Yields the payloads that tell a new link all names."""
        names = list(self._names.values())
        for at in range(0, len(names), NAMES_PER_FRAME):
            yield _ENCODER.encode(names[at : at + NAMES_PER_FRAME])

    def receive(self, payload: bytes) -> bytes:
        """Takes names over. Returns a payload with those that are new here, b"" without any.

        A payload that cannot be read is ignored: no message depends on it.
        """
        try:
            names = _DECODER.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return b""
        news = [each for each in names if self._is_news(each)]
        for each in news:
            self._names.pop(each.node, None)
            if len(self._names) >= MEMBERS_MAX:
                del self._names[next(node for node in self._names if node != self._own)]
            self._names[each.node] = each
        return _ENCODER.encode(news) if news else b""

    def _is_news(self, name: SiteName) -> bool:
        known = self._names.get(name.node)
        return name.node != self._own and (known is None or name.epoch > known.epoch)
