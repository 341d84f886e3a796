"""Shared subscriptions: who of a group's members may get a message, and how often.

A group with a member whose session outlives its connection loses nothing. With QoS 2 a message goes
to one member, whatever fails; only of a member without such a session nobody knows, once its node
or its connection is lost, whether it has what it was sent: that may come to another one or, as MQTT
has it, to nobody.
"""

from typing import TYPE_CHECKING, Final

from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import Publish
from tests.sim.checks import Message
from tests.sim.client import Client
from tests.sim.workload import Party, Publisher

if TYPE_CHECKING:
    from tests.sim.world import World

TOPICS: Final = ("s/0", "s/1")
FIRST_S: Final = 1.5
"""Before the member of a LoneTeam subscribes."""
SLOW_S: Final = 0.15
WINDOW: Final = 8
"""What a member has at a time, at most."""


class Receipt:
    def __init__(self, member: "Member", connection: int, node: str, qos: int) -> None:
        self.member = member
        self.connection = connection
        self.node = node
        self.qos = qos
        self.since = member.world.schedule.now

    def is_over(self) -> bool:
        """The member has nobody's word for what it had then."""
        client = self.member.client
        if not client.clean:
            return False
        if client.connects != self.connection or client.socket is None:
            return True
        return self.member.world.checks.was_down(self.node, self.since)


class Team:
    """A group, with `filter` as its members subscribe to it."""

    def __init__(self, world: "World", filter: str, qos: int) -> None:
        self.filter = filter
        self.qos = qos
        self.receipts: dict[str, list[Receipt]] = {}
        self.members: list[Member] = []
        self._world = world

    def received(self, member: "Member", packet: Publish) -> None:
        checks = self._world.checks
        text = packet.payload.decode()
        name = member.client.name
        stored = checks.stored.get(text, 0)
        if not stored:
            checks.fail(f"{name} has received {text}, which is not committed")
        receipts = self.receipts.setdefault(text, [])
        socket = member.client.socket
        assert socket is not None
        receipts.append(Receipt(member, member.client.connects, socket.host.name, packet.qos))
        if packet.qos != min(self.qos, checks.messages[text].qos):
            checks.fail(f"{name} has received {text} with QoS {packet.qos}")
        certain = [each for each in receipts if not each.is_over()]
        if packet.qos == 2 and len(certain) > stored:
            names = [f"{each.member.client.name}/{each.connection}" for each in receipts]
            checks.fail(f"{text} has come to {names} with QoS 2")

    def missing(self) -> list[str]:
        checks = self._world.checks
        messages = checks.messages
        return [
            text
            for text in checks.stored
            if messages[text].topic in TOPICS and text not in self.receipts
        ]

    def lost_max(self) -> int:
        """What may have gone to members that did not get it."""
        if self.qos < 2:
            return 0
        return sum(WINDOW * each.client.connects for each in self.members if each.client.clean)

    def check_quiet(self, messages: list[Message]) -> None:
        """Nothing was lost, so nothing has come twice."""
        for message in messages:
            if message.is_refused:
                self._world.checks.fail(f"{message.text} was refused, though nothing was wrong")
            receipts = self.receipts.get(message.text, [])
            if len(receipts) != 1:
                names = [each.member.client.name for each in receipts]
                self._world.checks.fail(
                    f"{message.text} of {self.filter} has come to {names}, though nothing was wrong"
                )


class Member(Party):
    client_type: type[Client] = Client

    def __init__(
        self,
        world: "World",
        team: Team,
        name: str,
        version: int,
        *,
        clean: bool = False,
        expiry_s: int | None = None,
    ) -> None:
        self.team = team
        filters = ((team.filter, team.qos),)
        client = self.client_type(
            world, name, version, clean=clean, filters=filters, expiry_s=expiry_s
        )
        super().__init__(world, client)
        team.members.append(self)
        client.on_message = lambda packet: team.received(self, packet)

    def unsettled(self) -> str:
        name = self.client.name
        if not self.client.is_connected or not self.client.is_subscribed:
            return f"{name} has not subscribed"
        missing = self.team.missing()
        if len(missing) > self.team.lost_max():
            return f"nobody of {self.team.filter} has received {missing[:5]} ({len(missing)})"
        return ""


class SlowClient(Client):
    """Acknowledges after a while, so that it has records inflight."""

    def _reply(self, kind: int, packet_id: int) -> None:
        socket = self.socket
        data = encode_ack(kind, packet_id, 0, self.version)

        def reply() -> None:
            if self.socket is socket:
                self._write(data)

        self.schedule.after(SLOW_S, reply)


class Leaver(Member):
    """Unsubscribes now and then, with records inflight, and subscribes again."""

    client_type = SlowClient

    def look(self) -> None:
        client = self.client
        if not client.is_connected:
            return
        if not client.is_subscribed:
            if not self.is_active or self.chance.random() < 0.3:
                client.resubscribe()
        elif self.is_active and self.chance.random() < 0.15:
            client.unsubscribe()


class LoneTeam(Team):
    """A group that begins during the run, with its only member: between where the SUBSCRIBE found
    the log, as the log says, and the SUBACK. From there on it loses nothing.

    What it owes begins with the group, not with the SUBACK. Counter-example: the member's node lags
    behind in the partition that has its member record, so the SUBACK comes 4 s after the SUBSCRIBE
    is in the log. What was stored meanwhile is the group's, and a backlog. If the quiet does not
    wait for it, a message of the quiet comes after its end, and seems lost.

    Nor with the SUBSCRIBE. Counter-example: the coordinator lags behind in the partition of the
    member's session. It opens the group where the member's node reports it, a record later.
    """

    acknowledged_at = float("inf")
    """The first SUBACK."""

    def start(self) -> list[int] | None:
        """By partition, where the SUBSCRIBE found the log."""
        (member,) = self.members
        return self._world.checks.sessions.starts.get(member.client.name, {}).get(self.filter)

    def missing(self) -> list[str]:
        checks = self._world.checks
        start = self.start()
        if start is None:
            return []
        known = checks.group_begins.get(self.filter, {})
        begin = [known.get(partition, offset) for partition, offset in enumerate(start)]
        for text in self.receipts:
            partition, offset = checks.places[text]
            begin[partition] = min(begin[partition], offset)
        return [
            text
            for text in super().missing()
            if checks.messages[text].sent_at > self.acknowledged_at
            or checks.places[text][1] >= begin[checks.places[text][0]]
        ]


class Absentee(Member):
    """The only member of its group: it subscribes during the run, and is away for seconds at a
    time."""

    def __init__(self, world: "World", team: LoneTeam, name: str, version: int) -> None:
        super().__init__(world, team, name, version)
        self._back_at = float("inf")
        self._team = team
        self.client.on_subscribed = self._subscribed

    def _subscribed(self) -> None:
        if self._team.start() is None:
            self.world.checks.fail(f"{self.client.name} has a SUBACK, and nothing is committed")
        self._team.acknowledged_at = min(self._team.acknowledged_at, self.world.schedule.now)

    def is_ready(self) -> bool:
        if self._back_at > self.world.schedule.now + FIRST_S:
            self._back_at = self.world.schedule.now + FIRST_S
        return True

    def look(self) -> None:
        client = self.client
        is_there = client.is_subscribed and client.is_connected
        if self.is_active and is_there and self.chance.random() < 0.1:
            self._back_at = self.world.schedule.now + 1.0 + self.chance.random() * 3
            client.disconnect()

    def is_wanted(self) -> bool:
        is_over = self.world.faults.is_over
        return is_over or self.world.schedule.now >= self._back_at


class MuteClient(Client):
    """Acknowledges nothing."""

    def _reply(self, kind: int, packet_id: int) -> None:
        """Send nothing, as if the client were stuck."""


class Mute(Member):
    """Never acknowledges what it receives."""

    client_type = MuteClient

    def __init__(self, world: "World", team: Team, name: str, version: int) -> None:
        super().__init__(world, team, name, version)
        self.wanders = False


class TeamPublisher(Publisher):
    topics = TOPICS

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self.quiet: list[Message] = []

    def may_publish(self) -> bool:
        return self.is_active or self.world.is_quiet

    def publish(self) -> None:
        super().publish()
        if self.world.is_quiet:
            self.quiet.append(self.newest)

    def check_quiet(self) -> None:
        teams = {each.team: None for each in self.world.parties if isinstance(each, Member)}
        for team in teams:
            team.check_quiet(self.quiet)
