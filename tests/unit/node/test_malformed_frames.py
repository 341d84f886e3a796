"""Malformed JSON in frames between nodes: the link is closed, and the node goes on."""

import json
import random

import msgspec
import pytest

from holdfast.node import frame_kinds as kinds
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.frames import OWNED_DECODER, OwnedSessions
from holdfast.node.routing.interest_frames import (
    INTEREST_ACK_DECODER,
    INTEREST_DECODER,
    Interest,
    InterestAck,
)
from tests.sim.world import Settings, World

NESTED = b"[" * 100_000
KINDS = sorted(
    number for name, number in vars(kinds).items() if name.isupper() and isinstance(number, int)
)


@pytest.fixture(scope="module")
def world() -> World:
    world = World(1, Settings())
    for host in world.hosts.values():
        host.start()
    while not world.is_in_sync():
        assert world.schedule.now < 60
        world.schedule.run(world.schedule.now + 0.1)
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_survives(kind: int, world: World) -> None:
    process = world.hosts["n1"].process
    assert process is not None
    for prefix in (b"", *(bytes((number,)) for number in range(8))):
        try:
            process.cluster_node.handle_frame("n2", kind, prefix + NESTED, world.schedule.now)
        except BadFrame:
            continue


FIELDS = (
    "added", "ask", "asking", "clean", "client", "epoch", "epochs", "expiry_s", "granted", "groups",
    "homes", "number", "owned", "partitions", "piece", "removed", "request", "username", "users",
    "whole",
)  # fmt: skip
VALUES = (
    None, True, 1, -1, 1.5, 1 << 70, "x", "\ud800", [], [[]], [1], [1 << 40], [None], ["x", []],
    [[1, 2, 3]], [["x"]], [["a", "b"]], [{}], {}, {"a": []},
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_other_types(kind: int, world: World) -> None:
    process = world.hosts["n1"].process
    assert process is not None
    rng = random.Random(kind)
    for _ in range(500):
        usual = rng.choice(VALUES)
        fields = {name: rng.choice((usual, rng.choice(VALUES))) for name in FIELDS}
        fields |= rng.choice(({}, {"request": 1, "client": "a"}, {"number": 1, "whole": True}))
        prefix = bytes((rng.randrange(6),)) if kind == kinds.GROUP else b""
        try:
            process.cluster_node.handle_frame(
                "n2", kind, prefix + json.dumps(fields).encode(), world.schedule.now
            )
        except BadFrame:
            continue


def test_frames_of_earlier_versions() -> None:
    """The bytes are those of the encoders that commit 704ebb7 has."""
    written = '{"number":1,"whole":true,"added":["a/ä"],"removed":["b"]}'.encode()
    interest = Interest(1, True, ["a/ä"], ["b"])
    assert INTEREST_DECODER.decode(written) == interest
    assert msgspec.json.encode(interest) == written
    assert INTEREST_ACK_DECODER.decode(b'{"number": 7}') == InterestAck(7)
    written = b'{"partitions":[0],"owned":[["c",5]],"asking":["d"],"users":{"c":"u"}}'
    report = OwnedSessions(partitions=[0], owned=[("c", 5)], asking=["d"], users={"c": "u"})
    assert OWNED_DECODER.decode(written) == report
    assert msgspec.json.encode(report) == written
    written = b'{"ask":true,"partitions":[0],"epochs":[3],"owned":[],"asking":[]}'
    request = OwnedSessions(ask=True, partitions=[0], epochs=[3], owned=[], asking=[])
    assert OWNED_DECODER.decode(written) == request
    assert msgspec.json.encode(request) == written
