"""Publications of this member's clients: their destinations, and the time of sending."""

from collections.abc import Callable

from holdfast.federation.core.context import MemberContext
from holdfast.federation.core.effects import Message
from holdfast.federation.core.frames import Data
from holdfast.federation.core.identity import MessageId
from holdfast.federation.core.messages.custody import Custody
from holdfast.federation.core.messages.forwarding import FrameForwarder
from holdfast.federation.core.messages.shared_groups import SharedGroups
from holdfast.federation.core.retained.service import RetainedMessages
from holdfast.federation.core.routing.interest import LocalInterest, RemoteInterest


class Origin:
    """The step from a client's publication to custody, or at QoS 0 directly to the links."""

    def __init__(
        self,
        context: MemberContext,
        local: LocalInterest,
        remote: RemoteInterest,
        custody: Custody,
        retained: RetainedMessages,
        forwarding: FrameForwarder,
        take_here: Callable[[Data, int, int, float], str | None],
    ) -> None:
        """`take_here`: `IncomingStreams.accept`."""
        self._identity = context.identity
        self._config = context.config
        self._remote = remote
        self._custody = custody
        self._retained = retained
        self._forwarding = forwarding
        self._sharing = SharedGroups(context, local, remote, custody, forwarding.can_reach)
        self._deliver_locally = take_here
        self._sequence = 0

    def skip_ids(self, count: int) -> None:
        """Skips the first ids of this epoch, because custody has used them."""
        self._sequence = count

    def new_id(self) -> MessageId:
        self._sequence += 1
        return MessageId(self._identity.node, self._identity.epoch, self._sequence)

    def publish(self, message: Message, now: float) -> MessageId | None:
        """Publishes a message and returns its id, or None if no other member is interested."""
        grants = self._sharing.grants(message)
        nodes = grants.keys() | set(self._remote.members(message.topic))
        nodes.discard(self._identity.node)
        if not nodes and not message.is_retained:
            return None
        id = self.new_id()
        if message.is_retained:
            message = _stamped(message, self._retained.publish(id, message, now))
        if not nodes:
            return None
        if message.qos:
            self._custody.accept(id, message, sorted(nodes), now, grants)
        else:
            data = Data(
                id.node,
                id.epoch,
                id.sequence,
                0,
                1,
                0,
                message.is_retained,
                message.topic,
                message.payload,
                message.properties,
                message.expiry_s,
                [(node, 0, 0) for node in sorted(nodes)],
                0,
                message.stamp,
                [(node, plain, list(shares)) for node, (plain, shares) in grants.items()],
            )
            self._originate(data, now)
        return id

    def send_due(self, now: float) -> None:
        """Sends the messages in custody that are due."""
        for data in self._custody.collect(self._can_reach, now):
            node, place, base = data.destinations[0]
            if node == self._identity.node:
                # A group's share came back to this origin. It has no other destination.
                self._deliver_locally(data, place, base, now)
            else:
                self._originate(data, now)

    def _can_reach(self, node: bytes) -> bool:
        return node == self._identity.node or self._forwarding.can_reach(node)

    def review_groups(self, now: float, left: bytes | None = None) -> None:
        """Reviews the grants in custody. `left`: a member that has left; its grants must move
        before custody drops its messages."""
        self._sharing.review(self.new_id, now, left)

    def _originate(self, data: Data, now: float) -> None:
        self._forwarding.originate(data, data.destinations, self._config.redundancy, now)


def _stamped(message: Message, stamp: int) -> Message:
    return Message(
        message.topic,
        message.payload,
        message.qos,
        message.is_retained,
        message.properties,
        message.expiry_s,
        message.delivered_id,
        stamp,
    )
