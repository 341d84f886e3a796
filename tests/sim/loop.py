"""The event loop of a simulated process: turns by the schedule's clock, and clients' sockets."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.node.effects import Effect, Note, ResumeInput
from holdfast.node.node import Node
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.sockets import ClientSocket


class EventLoop:
    """A `ClientPort`. Raises what the cores raise: that is a finding."""

    node: Node
    runtime: Runtime

    def __init__(self, host: "Host", number: int) -> None:
        self.host = host
        self.number = number
        self.schedule = host.world.schedule
        self.chance: random.Random = self.schedule.chance(f"{host.name}/{number}")
        self.is_over = False
        self.sockets: dict[Connection, ClientSocket] = {}
        self._turn_scheduled = False
        self._timer_at = float("inf")

    def post(self, work: Callable[[], None]) -> None:
        """From the schedule: in this process, when it runs."""
        if not self.is_over:
            self.host.post(work)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Call `work` after the delay, by a timer of this process."""
        self.schedule.after(delay_s, lambda: self._post_own(work))

    def _post_own(self, work: Callable[[], None]) -> None:
        if not self.is_over:
            self.host.post(work, is_own=True)

    def touch(self) -> None:
        """Something has come: the clock is set, and there will be a turn."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.runtime.begin(self.host.clock(), self.host.wall_us())
            self.later(self.chance.random() * self.host.world.settings.turn_s, self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        self.runtime.turn()
        if self.is_over:
            # The turn has ended the process.
            return
        self.turn_ended()
        when = self.runtime.timer()
        if when is not None:
            self._arm(when)

    def turn_ended(self) -> None:
        """A turn of a process that goes on."""

    def _arm(self, when: float) -> None:
        """In this process' time."""
        due = self.host.schedule_time(when)
        if due < self._timer_at:
            self._timer_at = due
            self.schedule.at(due, lambda: self._post_own(lambda: self._fire(due)))

    def _fire(self, due: float) -> None:
        if self._timer_at == due:
            self._timer_at = float("inf")
            self.touch()

    def flush(self, dirty: list[Connection]) -> None:
        for connection in dirty:
            connection.dirty = False
            socket = self.sockets.get(connection)
            if socket is not None:
                socket.flush()

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, ResumeInput):
            socket = self.sockets.get(effect.connection)
            if socket is not None:
                self.node.handle_resumed(effect.connection)
                socket.resume()
        elif isinstance(effect, Note):
            self.schedule.note(self.host.name, f"{effect.event} {effect.fields}")
            self.noted(effect)

    def noted(self, note: Note) -> None:
        """A line for the log of the process."""

    # Clients

    def accept(self, socket: "ClientSocket") -> Connection:
        self.touch()
        connection = self.node.handle_connected("sim", ListenerRules("sim"))
        self.sockets[connection] = socket
        return connection

    def received(self, connection: Connection, data: bytes) -> None:
        self.touch()
        self.node.handle_data(connection, data)

    def client_gone(self, connection: Connection) -> None:
        if self.sockets.pop(connection, None) is not None:
            self.touch()
            self.node.handle_disconnected(connection)
