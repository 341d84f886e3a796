"""Users that clients change at several nodes at once: the nodes agree, whatever fails.

Real metadata over real Raft peers, and the real runners of commands. Threads, disks and links are
the test's, which chooses the order of everything by a seed.
"""

import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands import agreed as agreed_commands
from holdfast.io.event_loop.commands.agreed import (
    UNKNOWN,
    AgreedCommandRunner,
    agreed_users,
)
from holdfast.node.effects import RunCommands
from holdfast.node.metadata.commands import PutUsers
from holdfast.node.metadata.effects import ProposalDone
from holdfast.node.metadata.model import USERS_BYTES_MAX, AgreedUsers
from holdfast.node.metadata.requests import Outcome
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.security.dynamic.agreed import differences, pack, unpack
from holdfast.security.dynamic.commands import SecurityChange
from holdfast.security.dynamic.document import (
    DynamicSecurityError,
    SecurityDocument,
    SecurityUser,
    parse,
)
from holdfast.security.dynamic.file import DynamicSecurityFile
from holdfast.security.dynamic.users import DynamicUsers
from tests.support.node_bench import NodeBench
from tests.unit.node.metadata.test_store import Nodes, founded

SEEDS = 4
LONG_SEEDS = 200
STEPS = 120
SEED_FILE = b'{"clients": [{"username": "seed"}], "roles": [{"rolename": "r"}]}'


def file_users() -> DynamicUsers:
    path = Path("users.json")
    return DynamicUsers.of(DynamicSecurityFile(path, parse(SEED_FILE, "f"), (0, 0, 0)), None, None)


class Process:
    """One life of one node: its broker's core, its runner, and its thread."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.bench = NodeBench()
        self.work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.proposed: dict[int, Callable[[Outcome], None]] = {}
        self.seen = 0
        self.older = ""
        broker = SimpleNamespace(
            node=self.bench.node,
            passwords=SimpleNamespace(file=None),
            runtime=SimpleNamespace(cluster_node=self.bench.core.cluster),
            touch=lambda: None,
            record_changes=self.record,
        )
        users = agreed_users(file_users(), self)
        self.runner = AgreedCommandRunner(cast(Broker, broker), users, self, self)

    # The thread

    def __call__(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work.append((work, done))

    def close(self) -> None:
        self.work.clear()

    def step(self) -> None:
        """One result of the thread comes back."""
        if self.work:
            work, done = self.work.popleft()
            done(work())
            self.bench.run()

    # The agreement

    def current(self) -> AgreedUsers | None:
        metadata = self.world.nodes.stores[self.name].metadata
        return None if metadata is None else metadata.users

    def refusal(self) -> str:
        return self.older

    def propose(self, expected_version: int, data: bytes, done: Callable[[Outcome], None]) -> None:
        store = self.world.nodes.stores[self.name]
        self.proposed[store.propose(PutUsers(expected_version, data), self.world.nodes.now)] = done

    def notice(self) -> None:
        """The end of a turn: new metadata, then the outcomes of proposals."""
        self.runner.changed()
        seen = self.world.nodes.seen[self.name]
        while self.seen < len(seen):
            effect = seen[self.seen]
            self.seen += 1
            if isinstance(effect, ProposalDone) and effect.request in self.proposed:
                self.proposed.pop(effect.request)(effect.outcome)
        self.bench.run()

    # The clients

    def command(self, **fields: object) -> None:
        connection = Connection(1000, "c:1", ListenerRules("l"))
        payload = json.dumps({"commands": [fields]}).encode()
        self.runner.run(RunCommands(connection, payload, 0, 0))

    def record(self, changes: list[SecurityChange], done: Callable[[], None]) -> None:
        for change in changes:
            command = (change.outcome.name, change.outcome.target)
            assert command not in self.world.answers
            self.world.answers[command] = change.outcome.error
            if not change.outcome.error:
                # It is in force here before it is answered.
                self.world.check_answered(self, command)
        done()


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes: Nodes = founded(3)
        self.answers: dict[tuple[str, str], str] = {}
        self.processes = {name: Process(self, name) for name in self.nodes.stores}
        self.count = 0
        self.created: list[str] = []
        self.lost_requests: set[tuple[str, str]] = set()

    def check_answered(self, process: Process, command: tuple[str, str]) -> None:
        name, target = command
        users = process.runner.users
        if name == "createClient":
            assert target in users.file.document.users
        elif name == "disableClient":
            assert target in users.disabled
        assert process.bench.node.state.admission.disabled_users == users.disabled

    def command(self) -> None:
        process = self.rng.choice(list(self.processes.values()))
        self.count += 1
        enabled = [name for name in self.created if ("disableClient", name) not in self.answers]
        if enabled and self.rng.random() < 0.3:
            name = enabled[self.rng.randrange(len(enabled))]
            self.created.remove(name)
            process.command(command="disableClient", username=name)
        else:
            name = f"u{self.count}"
            self.created.append(name)
            process.command(command="createClient", username=name)

    def restart(self) -> None:
        name = self.rng.choice(list(self.processes))
        self.nodes.start(name)
        self.processes[name] = Process(self, name)

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.3:
            self.command()
        elif kind < 0.7:
            self.rng.choice(list(self.processes.values())).step()
        elif kind < 0.73:
            self.restart()
        elif kind < 0.77:
            self.nodes.cut = {self.rng.choice(list(self.processes))} - self.nodes.cut
        elif kind < 0.95:
            self.nodes.settle()
        else:
            self.nodes.run(self.rng.choice((0.05, 0.3, 2.0)))
        process = self.rng.choice(list(self.processes.values()))
        process.notice()

    def end(self) -> None:
        """Everything that can come back does."""
        self.nodes.cut = set()
        for _ in range(200):
            self.nodes.run(0.1)
            for process in self.processes.values():
                process.notice()
                while process.work:
                    process.step()
            versions = {process.runner.users.version for process in self.processes.values()}
            if len(versions) == 1 and not any(each.proposed for each in self.processes.values()):
                return
        raise AssertionError("the nodes do not come to rest")


def content(users: DynamicUsers) -> bytes:
    return b"".join(users.file.document.chunks())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS, LONG_SEEDS))
def test_all_nodes_have_what_was_confirmed_long(seed: int) -> None:
    test_all_nodes_have_what_was_confirmed(seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_nodes_have_what_was_confirmed(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.end()
    all_users = [process.runner.users for process in world.processes.values()]
    assert len({(users.version, content(users)) for users in all_users}) == 1
    for process in world.processes.values():
        admission = process.bench.node.state.admission
        assert admission.disabled_users == process.runner.users.disabled or not all_users[0].version
    document = all_users[0].file.document
    assert "seed" in document.users
    assert any(not error for error in world.answers.values())
    for (name, target), error in world.answers.items():
        if not error:
            assert target in document.users
            if name == "disableClient":
                assert document.users[target].disabled
        elif name == "createClient" and not error.startswith(UNKNOWN):
            assert target not in document.users, error


def test_the_model_finds_a_change_that_ignores_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that proposes its users as the successor of whatever is there undoes those of
    others."""

    def propose(
        self: Process, expected_version: int, data: bytes, done: Callable[[Outcome], None]
    ) -> None:
        store = self.world.nodes.stores[self.name]
        current = self.current()
        version = 0 if current is None else current.version
        self.proposed[store.propose(PutUsers(version, data), self.world.nodes.now)] = done

    monkeypatch.setattr(Process, "propose", propose)
    with pytest.raises(AssertionError):
        _play_all()


def _play_all() -> None:
    for seed in range(SEEDS):
        test_all_nodes_have_what_was_confirmed(seed)


def test_a_node_that_is_always_too_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_commands, "ATTEMPTS_MAX", 3)
    world = World(0)
    late, other = world.processes["n2"], world.processes["n1"]
    late.command(command="createClient", username="late")
    for number in range(4):
        other.command(command="createClient", username=f"first{number}")
        for _ in range(4):
            other.step()
            world.nodes.run(0.02)
            other.notice()
        assert world.answers[("createClient", f"first{number}")] == ""
        late.step()
        for _ in range(4):
            world.nodes.run(0.02)
            late.notice()
            if late.work and getattr(late.work[0][0], "func", None) is not agreed_commands._run:
                late.step()
    assert world.answers[("createClient", "late")] == agreed_commands.OVERTAKEN


def test_without_a_majority_the_answer_says_that_nothing_is_known() -> None:
    world = World(0)
    process = world.processes["n2"]
    world.nodes.cut = {"n2"}
    process.command(command="createClient", username="u")
    process.step()
    world.nodes.run(6.0)
    process.notice()
    error = world.answers[("createClient", "u")]
    assert error.startswith(f"{UNKNOWN}: no majority")


def test_an_older_node_prevents_changes() -> None:
    world = World(0)
    process = world.processes["n1"]
    process.older = "the version of n3 has no agreed users: upgrade all nodes first"
    process.command(command="createClient", username="u")
    process.step()
    assert world.answers == {("createClient", "u"): f"not changed: {process.older}"}
    assert process.current() is None


def test_too_many_users_are_refused() -> None:
    document = SecurityDocument()
    rng = random.Random(1)
    for number in range(2500):
        text = rng.randbytes(500).hex()
        document.users[f"u{number}"] = SecurityUser(f"u{number}", textname=text)
    with pytest.raises(DynamicSecurityError, match="at most 1048576 bytes, compressed"):
        pack(document, USERS_BYTES_MAX)


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_packed_users_that_are_cut_off(cut: int) -> None:
    data = pack(parse(SEED_FILE, "f"), USERS_BYTES_MAX)
    assert b"".join(unpack(data).chunks()) == b"".join(parse(SEED_FILE, "f").chunks())
    with pytest.raises(DynamicSecurityError, match="the users of the cluster"):
        unpack(data[:cut])


def test_who_has_to_connect_again() -> None:
    names = ("same", "texts", "password", "client", "disabled", "deleted")
    before, after = SecurityDocument(), SecurityDocument()
    before.users = {name: SecurityUser(name) for name in names}
    after.users = {
        "same": SecurityUser("same"),
        "texts": SecurityUser("texts", textname="x"),
        "password": SecurityUser("password", password="x"),
        "client": SecurityUser("client", clientid="x"),
        "disabled": SecurityUser("disabled", disabled=True),
        "new": SecurityUser("new"),
    }
    changes = differences(before, after)
    assert changes.expelled == {"password", "client", "disabled", "deleted"}
    assert changes.users == changes.expelled | {"texts", "new"}
    assert not changes.are_for_all


def test_a_runner_that_is_closed_while_its_thread_runs_commands() -> None:
    """By a reload without `dynamic_security_file`, or by a stop. Nothing is agreed on, so the
    command is not answered as done."""
    world = World(1)
    process = next(iter(world.processes.values()))
    process.command(command="createClient", username="u", password="p")
    work, done = process.work.popleft()
    result = work()
    process.runner.close()
    done(result)
    process.bench.run()
    assert not process.proposed
    assert world.answers.get(("createClient", "u"), "no answer") != ""
    process.command(command="createClient", username="w")
    assert not process.work
    assert not process.runner._queue._waiting, "a message would wait for ever"


def test_a_runner_that_is_closed_while_its_change_is_proposed() -> None:
    """Another node was first, and its users are in force here. The refusal comes after the close,
    and the thread takes no more work then."""
    world = World(1)
    first, second = list(world.processes.values())[:2]
    first.command(command="createClient", username="u")
    work, done = first.work.popleft()
    result = work()  # on the users of version 0
    second.command(command="createClient", username="v")
    second.step()
    for _ in range(20):
        world.nodes.run(0.1)
        second.notice()
        first.notice()
        while first.work:
            first.step()
    assert first.runner.users.version
    done(result)
    ((request, decided),) = first.proposed.items()
    world.nodes.run(2.0)
    seen = world.nodes.seen[first.name]
    (outcome,) = [each.outcome for each in seen if getattr(each, "request", None) == request]
    first.runner.close()
    calls: list[object] = []
    first.runner._worker = lambda *args: calls.append(args)
    decided(outcome)
    assert not calls
