"""Continues a connection's input in a later turn, and mounts its filters."""

from holdfast.node.delivery.replay_start import start_prefix
from holdfast.node.effects import ResumeInput
from holdfast.node.node_state import NodeState, Work
from holdfast.node.session.connection import Connection
from holdfast.protocol.mqtt.packets import Packet, Subscribe, Unsubscribe
from holdfast.protocol.topics.names import mounted_filter


class Input(Work):
    """The continuation of a connection's input that was too much for one turn."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def step(self, state: NodeState, steps: int) -> int:
        self.has_more = False
        if not self.connection.closing:
            state.effects.append(ResumeInput(self.connection))
        return steps


def mount_filters(packet: Packet, mount: str) -> None:
    """Puts the prefix of the client's topics in front of the filters of a SUBSCRIBE or
    UNSUBSCRIBE."""
    if isinstance(packet, Subscribe):
        for request in packet.subscriptions:
            request.filter = _mounted(mount, request.filter)
    elif isinstance(packet, Unsubscribe):
        packet.filters = [_mounted(mount, filter) for filter in packet.filters]


def _mounted(mount: str, filter: str) -> str:
    """The filter below the mount; a start in the past stays in front."""
    start = start_prefix(filter)
    return start + mounted_filter(mount, filter[len(start) :])
