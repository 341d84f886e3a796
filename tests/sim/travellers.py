"""Sessions that come late and begin in the past: they must see what one saw who was there."""

from typing import TYPE_CHECKING

from holdfast.protocol.mqtt.packets import Publish
from tests.sim.client import Client
from tests.sim.workload import Subscriber

if TYPE_CHECKING:
    from tests.sim.world import World


class Traveller(Subscriber):
    """It first connects `late_s` seconds into the run, and wanders like the others."""

    def __init__(self, world: "World", name: str, version: int, qos: int, late_s: float) -> None:
        filters = (("$stream/@earliest/t/#", qos),)
        super().__init__(world, Client(world, name, version, filters=filters), ("t/",))
        self._starts: list[int] = []
        """The highest first offsets of the logs of the nodes that it was connected to."""
        self.client.on_subscribed = self._look_at_log
        self.client.on_connected = self._look_at_log
        self._begins_at = world.schedule.now + late_s

    def is_wanted(self) -> bool:
        return self.world.schedule.now >= self._begins_at

    def _look_at_log(self) -> None:
        """Another node may have removed more of its log. It reports that as `records_lost`, or the
        start is found in its log."""
        socket = self.client.socket
        if socket is None:
            return
        hosts = [socket.host]
        if self.world.settings.reads_remotely or self.world.settings.gateways:
            hosts = self.world.data_hosts
        for host in hosts:
            if host.process is not None:
                starts = host.process.cores.storage.journal.start_offsets
                self._starts = list(map(max, self._starts or starts, starts))

    def missing(self) -> list[str]:
        """Retention may have removed what was published before its SUBSCRIBE."""
        if not self._starts:
            return super().missing()
        places = self.world.checks.places
        return [
            text for text in super().missing() if places[text][1] >= self._starts[places[text][0]]
        ]

    def is_ready(self) -> bool:
        """The work of the others does not wait for it."""
        return True

    def _arrived(self, packet: Publish) -> None:
        if self.client.subscribes > 1:
            # The SUBACK was lost, and the second SUBSCRIBE has begun anew: everything may come
            # again, from the first message on.
            self.received[packet.payload.decode()] = 1
            return
        message = self.world.checks.messages.get(packet.payload.decode())
        if message is not None and self.world.checks.stored.get(message.text, 0) > 1:
            # It may have missed the first copy, and the second one is out of order.
            self._newest.pop((message.publisher, message.topic), None)
        super()._arrived(packet)
