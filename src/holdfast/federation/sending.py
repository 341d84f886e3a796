"""Messages of this member's clients: to whom they go, and when."""

from holdfast.federation.config import FederationConfig
from holdfast.federation.custody import Custody
from holdfast.federation.effects import Effect, Message
from holdfast.federation.forwarding import Forwarding
from holdfast.federation.frames import Data
from holdfast.federation.identity import Identity, MessageId
from holdfast.federation.interest import LocalInterest, RemoteInterest
from holdfast.federation.retained_messages import RetainedMessages
from holdfast.federation.sharing import Sharing


class Sending:
    def __init__(
        self,
        identity: Identity,
        config: FederationConfig,
        local: LocalInterest,
        remote: RemoteInterest,
        custody: Custody,
        retained: RetainedMessages,
        forwarding: Forwarding,
        effects: list[Effect],
    ) -> None:
        self._identity = identity
        self._config = config
        self._remote = remote
        self._custody = custody
        self._retained = retained
        self._forwarding = forwarding
        self._sharing = Sharing(
            identity.node,
            config.share_patience_s,
            local,
            remote,
            custody,
            forwarding.can_reach,
            effects,
        )
        self._sequence = 0

    def new_id(self) -> MessageId:
        self._sequence += 1
        return MessageId(self._identity.node, self._identity.epoch, self._sequence)

    def publish(self, message: Message, now: float) -> MessageId | None:
        """None: nobody else wants it."""
        grants = self._sharing.grants(message.topic)
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
            self._custody.take(id, message, sorted(nodes), now, grants)
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
        """What is in custody and may go out."""
        for data in self._custody.collect(self._forwarding.can_reach, now):
            self._originate(data, now)

    def review_groups(self, now: float) -> None:
        self._sharing.review(self.new_id, now)

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
        message.came_from,
        stamp,
    )
