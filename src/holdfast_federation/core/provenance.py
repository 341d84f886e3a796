"""Checks of which fields of a frame a member believes, by the link that the frame came over.

A link proves one member: the peer at its other end. Everything else in a frame is that peer's
claim. The table has each kind of frame, and the check before a field is believed:

| frame | field | believed when |
|---|---|---|
| Data, Skip | origin | it is announced, and the peer is on the path from it to here |
| | epoch | it is at most the announced one; at QoS 0 it is the announced one |
| | path | it is below this member's `redundancy` |
| | destinations | the peer is on the path from the origin that this copy takes to each |
| | place, base, grants, content | the origin is believed |
| StreamAck | destination | it is announced, and the peer is on a shortest path to it |
| | origin | it is this member, or it is announced |
| | epoch, place | at the origin: no further than what was sent |
| RetainedRequest, Retained, RetainedDigest | source | it is announced, and the peer is on a path |
| Retained | versions | see `retained.clock`: no stamp from the future |
| Announcement | all | see `routing.flooding.Flooder.handle_news` |
| Hello, AnnouncementRequest, Goodbye | all | they concern the link alone |

"On the path" means on a shortest path by this member's database. A member on it could forge the
frames that it relays; every other member could not. Smallest counter-example: A, B and C are linked
with each other. Without the check C confirms to A what A has sent to B. A deletes the message, and
B never receives it.

While databases differ, an honest frame may fail a check. It is then lost as on a broken link, and
at QoS 1 and 2 the origin retransmits it.
"""

from msgspec.structs import replace

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.frames import Data, Skip, StreamAck
from holdfast_federation.core.messages.forwarding import Passing
from holdfast_federation.core.routing.link_state import LinkStateDatabase
from holdfast_federation.core.routing.routes import Routes


class Provenance:
    """The checks of frames from peers, by this member's graph. It counts each rejection."""

    def __init__(
        self,
        context: MemberContext,
        database: LinkStateDatabase,
        routes: Routes,
    ) -> None:
        self._own = context.node
        # The number of paths by which messages are accepted. Each further path lets further
        # members forge the messages that they relay.
        self._redundancy = context.config.redundancy
        self._entries = database.entries
        self._routes = routes
        self._counts = context.counts

    def of_data(self, peer: bytes, data: Data | Skip) -> Data | Skip | None:
        """Returns the message with only those destinations that the peer may relay it to, or None
        if there are none."""
        origin = self._entries.get(data.node)
        if origin is None:
            self._counts["unknown member"] += 1
            return None
        has_places = isinstance(data, Skip) or data.qos > 0
        if data.epoch > origin.epoch or (data.epoch < origin.epoch and not has_places):
            self._counts["unknown epoch"] += 1
            return None
        if not data.path:
            if self._routes.leads(peer, data.node):
                return data
            self._counts["off path"] += len(data.destinations)
            return None
        if data.path >= self._redundancy:
            self._counts["further path"] += len(data.destinations)
            return None
        destinations = [
            place
            for place in data.destinations
            if self._routes.is_before(peer, data.path, data.node, place[0])
        ]
        self._counts["off path"] += len(data.destinations) - len(destinations)
        return replace(data, destinations=destinations) if destinations else None

    def of_ack(self, peer: bytes, ack: StreamAck) -> bool:
        """Returns whether the peer is on a path to the destination that confirms."""
        if ack.origin != self._own and ack.origin not in self._entries:
            self._counts["unknown member"] += 1
            return False
        if not self._routes.leads(peer, ack.destination):
            self._counts["off path"] += 1
            return False
        return True

    def of_passing(self, peer: bytes, frame: Passing) -> bool:
        """Returns whether the peer is on a path to the source of the frame."""
        if frame.source not in self._entries:
            self._counts["unknown member"] += 1
            return False
        if not self._routes.leads(peer, frame.source):
            self._counts["off path"] += 1
            return False
        return True
