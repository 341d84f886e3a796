"""Changes of one ban, or of one queue, each while the record of the one before is not committed.

Each change decides on what is applied. What comes of the two must be what comes of them one after
the other, in the order in which they were requested.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import permutations, product
from types import SimpleNamespace
from typing import Final, cast

import pytest
from starlette.requests import Request

from holdfast.api.access.bans import BanRoutes, NewBan
from holdfast.api.endpoints import ApiRefusal, Call, Caller, Values
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.process import ServedProcess
from holdfast.node.config import NodeConfig
from holdfast.node.groups.queue_changes import delete_queue
from holdfast.protocol.mqtt import packets as m
from holdfast.security.access.scopes import Scope
from tests.support.node_bench import NodeBench
from tests.unit.node.delivery.test_replay import drain

CLIENT: Final = "c"


class Operator:
    """The admin port of a node whose disk is slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0), auto_commit=False)
        broker = SimpleNamespace(loop=loop, node=self.bench.node, touch=lambda: None)
        config = SimpleNamespace(node=SimpleNamespace(id="n1"))
        server = cast(
            ServedProcess, SimpleNamespace(broker=broker, config=config, sharing=None, cluster=None)
        )
        self.routes = BanRoutes(OwnNode(server), Everywhere(server))

    async def send(self, handle: Callable[[Call], Awaitable[object]], body: object) -> str:
        values: Values = {"client": CLIENT}
        caller = Caller("user amy", Scope.OPERATOR)
        endpoint = self.routes.endpoints()[1]
        try:
            await handle(Call(cast(Request, None), endpoint, caller, values, body))
        except ApiRefusal as error:
            return str(error.status)
        return "done"

    def ban(self, reason: str) -> Coroutine[object, object, str]:
        return self.send(self.routes._ban, NewBan(client=CLIENT, reason=reason))

    def lift(self) -> Coroutine[object, object, str]:
        return self.send(self.routes._lift, None)

    def outcome(self) -> list[tuple[str, str]]:
        bans = self.bench.node.state.bans
        found = [bans.get(*name) for name in bans.names()]
        return [(ban.name, ban.reason) for ban in found if ban is not None]


BAN_CHANGES: Final[dict[str, Callable[[Operator], Coroutine[object, object, str]]]] = {
    "ban": lambda operator: operator.ban("one"),
    "ban for another reason": lambda operator: operator.ban("two"),
    "lift": Operator.lift,
}


async def changed(names: tuple[str, ...], *, in_flight: bool) -> list[tuple[str, str]]:
    operator = Operator(asyncio.get_running_loop())
    requests = []
    for name in names:
        requests.append(asyncio.ensure_future(BAN_CHANGES[name](operator)))
        for _ in range(5):
            await asyncio.sleep(0)
        if not in_flight:
            operator.bench.commit()
            await requests[-1]
    operator.bench.settle()
    await asyncio.gather(*requests)
    before = operator.outcome()
    operator.bench.crash()
    assert operator.outcome() == before
    return before


@pytest.mark.parametrize("names", list(product(BAN_CHANGES, repeat=3)))
def test_bans_change_one_after_the_other(names: tuple[str, ...]) -> None:
    wanted = asyncio.run(changed(names, in_flight=False))
    assert asyncio.run(changed(names, in_flight=True)) == wanted


KEY: Final = "$share/$queue/a/#"


class Queue:
    """A queue on a node whose disk is slow."""

    def __init__(self) -> None:
        self.bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0), auto_commit=False)
        self.outcomes: list[str] = []
        publisher = self.bench.connect("p")
        reader = self.bench.connect("r")
        reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)]))
        self.bench.settle()
        reader.take()
        reader.send(m.Unsubscribe(2, ["$queue/a/#"]))
        self.bench.settle()
        publisher.send(m.Publish(b"a/1", b"old", 1, False, False, 1, b"", 0, -1))
        self.bench.settle()

    def subscribe(self) -> None:
        reader = self.bench.connect("r")
        reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)]))

    def delete(self) -> None:
        """Delete as the admin port does: a queue that is there, and has no member."""
        state = self.bench.node.state
        group = state.groups.get(KEY)
        if KEY in state.queues and (group is None or len(group.members) == 1):
            delete_queue(state, KEY, self.outcomes.append)

    def outcome(self) -> list[object]:
        """Whether it is there, and what a member receives then and after a restart."""
        bench = self.bench
        found: list[object] = []
        for name in ("again", "after a restart"):
            reader = bench.connect(name)
            reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)]))
            bench.settle()
            found.append((KEY in bench.node.state.queues, drain(reader)))
            bench.crash()
        return found


QUEUE_CHANGES: Final[dict[str, Callable[[Queue], None]]] = {
    "subscribe": Queue.subscribe,
    "delete": Queue.delete,
}


def queue_after(names: tuple[str, ...], *, in_flight: bool) -> list[object]:
    queue = Queue()
    for name in names:
        QUEUE_CHANGES[name](queue)
        if not in_flight:
            queue.bench.settle()
    queue.bench.settle()
    state = queue.bench.node.state
    before: list[object] = [KEY in state.queues, sorted(map(str, state.groups))]
    return before + queue.outcome()


@pytest.mark.parametrize("names", [*permutations(QUEUE_CHANGES, 2), ("delete", "delete")])
def test_a_queue_changes_once_after_the_other(names: tuple[str, ...]) -> None:
    allowed = [queue_after(names, in_flight=False)]
    if names[0] == "subscribe":
        # The member is in the log behind the deletion.
        allowed.append(queue_after(names[::-1], in_flight=False))
    assert queue_after(names, in_flight=True) in allowed
