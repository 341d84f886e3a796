"""The users and tokens of the admin port at nodes of a cluster: the nodes agree, whatever fails.

Real metadata over real Raft peers, and real files. Links and time are the test's.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from msgspec.structs import replace

from holdfast.api.access.agreed import AgreedAccess
from holdfast.api.endpoints import ApiRefusal
from holdfast.io.event_loop.commands.agreement import AccessAgreement
from holdfast.node.metadata.codec import decode_metadata, encode_metadata
from holdfast.node.metadata.commands import Command
from holdfast.node.metadata.effects import ProposalDone
from holdfast.node.metadata.model import USERS_BYTES_MAX, AgreedUsers
from holdfast.node.metadata.requests import Outcome
from holdfast.security.access.access_file import (
    AccessData,
    AccessError,
    AccessFile,
    StoredToken,
    StoredUser,
)
from holdfast.security.access.agreed import merged, pack, taken, unpack
from holdfast.security.access.changes import add_token, add_user, remove_token, remove_user
from holdfast.security.access.credentials import AdminCredentials
from holdfast.security.peer_identity import PeerIdentity
from tests.unit.node.metadata.test_store import Nodes, founded

T = TypeVar("T")
HASH = "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2g"


class AccessNode:
    """The admin port's users at one node, in one life of its process."""

    def __init__(self, world: "AccessWorld", name: str, *, joins: bool = False) -> None:
        self.world = world
        self.name = name
        self.older: list[str] = []
        self.proposed: dict[int, Callable[[Outcome], None]] = {}
        self.seen = len(world.nodes.seen[name])
        store = world.nodes.stores[name]
        node = self

        class Context:
            node_id = name
            features = dict.fromkeys(world.nodes.stores, "")

            @property
            def metadata(self) -> object:
                return store.metadata

            def nodes_without(self, feature: str, *, witnesses: bool = False) -> list[str]:
                return node.older

        self.context = Context()
        incarnation = world.incarnation(name)
        identity = PeerIdentity(name, incarnation, "" if joins else "c")
        self.agreement = AccessAgreement(
            cast(Any, SimpleNamespace(context=self.context, meta=store)),
            identity,
            ["n1:1"],
            self.propose,
            lambda: world.nodes.now,
        )
        self.agreement.is_ready = True
        self.credentials = AdminCredentials(world.directory / name)
        self.agreed = AgreedAccess(self.agreement, self.credentials)

    def propose(self, command: Command, done: Callable[[Outcome], None]) -> None:
        store = self.world.nodes.stores[self.name]
        self.proposed[store.propose(command, self.world.nodes.now)] = done

    def notice(self) -> None:
        seen = self.world.nodes.seen[self.name]
        while self.seen < len(seen):
            effect = seen[self.seen]
            self.seen += 1
            if isinstance(effect, ProposalDone) and effect.request in self.proposed:
                self.proposed.pop(effect.request)(effect.outcome)

    def users(self) -> set[str]:
        return set(self.credentials.data.users)

    def add(self, name: str) -> Coroutine[Any, Any, None]:
        return self.agreed.change(add_user(name, "admin", HASH, 0))


class AccessWorld:
    def __init__(self, directory: Path, count: int = 3) -> None:
        self.directory = directory
        self.nodes: Nodes = founded(count)
        self.processes: dict[str, AccessNode] = {}
        for name in self.nodes.stores:
            self.start(name)

    def incarnation(self, name: str) -> str:
        metadata = self.nodes.stores["n1"].metadata
        assert metadata is not None
        return metadata.nodes[name].incarnation

    def start(self, name: str) -> AccessNode:
        self.processes[name] = AccessNode(self, name)
        return self.processes[name]

    async def play(self, *work: Coroutine[Any, Any, T]) -> list[T]:
        """Run work to its end, while the cluster goes on. Returns results, and refusals."""
        tasks = [asyncio.ensure_future(each) for each in work]
        deadline = asyncio.get_running_loop().time() + 60
        while not all(task.done() for task in tasks):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.001)
            self.nodes.run(0.02)
            for process in self.processes.values():
                process.notice()
        return await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[return-value]

    async def settle(self) -> None:
        """Everything agreed is everywhere."""
        for _ in range(4):
            self.nodes.run(1.0)
            await self.play(*(each.agreed.follow() for each in self.processes.values()))

    def all_users(self) -> list[set[str]]:
        return [each.users() for each in self.processes.values()]


def offline(world: AccessWorld, name: str) -> AccessFile:
    return AccessFile(world.directory / name)


def refusal(results: list[Any]) -> str:
    (found,) = results
    assert isinstance(found, ApiRefusal), found
    assert found.status == 503
    return str(found)


def test_a_user_of_one_node_is_at_all_and_its_removal_too(tmp_path: Path) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1, n2, n3 = world.processes.values()
        await world.play(n1.add("ada"))
        assert n1.users() == {"ada"}, "it is in force before it is replied"
        await world.settle()
        assert world.all_users() == [{"ada"}] * 3
        await world.play(n2.add("eve"), n3.add("bob"))
        await world.settle()
        assert world.all_users() == [{"ada", "eve", "bob"}] * 3
        await world.play(n3.agreed.change(remove_user("ada")))
        await world.settle()
        assert world.all_users() == [{"eve", "bob"}] * 3
        # The file has them, so a start knows them before it meets another node.
        for name in world.processes:
            assert set(offline(world, name).read().users) == {"eve", "bob"}

    asyncio.run(play())


def test_files_of_an_earlier_version_are_all_adopted_once(tmp_path: Path) -> None:
    """Each node had tokens of its own, and none of them stops working. A user of two files is the
    one that was first."""
    made = {}
    for number, name in enumerate(("n1", "n2", "n3")):
        file = AccessFile(tmp_path / name)
        made[name] = file.change(add_token("viewer", 0))[0]
        file.change(add_user("ada", "admin", f"{HASH}{number}", 0))

    async def play() -> None:
        world = AccessWorld(tmp_path)
        await world.settle()
        data = [each.credentials.data for each in world.processes.values()]
        assert all(set(each.tokens) == set(made.values()) for each in data)
        assert len({each.users["ada"].password for each in data}) == 1
        # Once: what is removed afterwards does not come back with a restart of another node.
        removed = made["n2"]
        await world.play(world.processes["n1"].agreed.change(remove_token(removed)))
        world.start("n2")
        await world.settle()
        assert all(removed not in each.credentials.data.tokens for each in world.processes.values())

    asyncio.run(play())


def test_a_change_by_the_command_line_counts_here_at_once_and_everywhere_soon(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1, n2, _ = world.processes.values()
        await world.play(n1.add("ada"), n2.add("eve"))
        await world.settle()
        world.nodes.cut = {"n1"}
        offline(world, "n1").change(add_user("ops", "admin", HASH, 0))
        offline(world, "n1").change(remove_user("eve"))
        n1.credentials.refresh()
        world.nodes.run(5.0)
        await world.play(n1.agreed.follow())
        assert n1.users() == {"ada", "ops"}, "it is in force without a majority"
        assert n2.users() == {"ada", "eve"}
        # Meanwhile the others agree on something else.
        await world.play(n2.add("bob"))
        world.nodes.cut = set()
        await world.settle()
        assert world.all_users() == [{"ada", "bob", "ops"}] * 3
        assert offline(world, "n1").read().agreed is not None
        assert offline(world, "n1").read().agreed.users == []  # type: ignore[union-attr]

    asyncio.run(play())


def test_without_a_majority_the_last_users_count_and_changes_are_refused(tmp_path: Path) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1 = world.processes["n1"]
        await world.play(n1.add("ada"))
        await world.settle()
        world.nodes.cut = {"n1"}
        world.nodes.run(10.0)
        assert "reaches no majority" in refusal(await world.play(n1.add("eve")))
        n1 = world.start("n1")
        assert n1.users() == {"ada"}
        assert not n1.agreed.is_locked()

    asyncio.run(play())


def test_a_new_disk_is_locked_until_it_knows_the_users(tmp_path: Path) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1 = world.processes["n1"]
        await world.play(n1.add("ada"))
        await world.settle()
        # Before it has heard of the cluster, and while it applies entries before its own entry.
        for metadata in (None, world.nodes.stores["n1"].metadata):
            new = AccessNode(world, "n3", joins=True)
            new.agreement._context = cast(Any, SimpleNamespace(metadata=metadata, node_id="n3"))
            new.agreement._incarnation = "anotherdisk"
            new.credentials.own = AccessData()
            new.credentials._data = AccessData()
            assert new.agreed.is_locked()
            await new.agreed.follow()
            assert new.agreed.is_locked()
        (tmp_path / "n3" / "access.json").unlink()
        new = AccessNode(world, "n3", joins=True)
        assert not new.credentials.is_set_up
        assert new.agreed.is_locked(), "it knows that there are users, and not which ones"
        await new.agreed.follow()
        assert new.users() == {"ada"}
        assert not new.agreed.is_locked()

    asyncio.run(play())


def test_a_node_whom_others_take_in_is_locked_from_then_on(tmp_path: Path) -> None:
    """It names no node to join, and they dial it at the address of its old disk."""

    async def play() -> None:
        world = AccessWorld(tmp_path)
        new = AccessNode(world, "n3")
        new.agreement._incarnation = "anotherdisk"
        assert new.agreed.is_locked()
        new.agreement._context = cast(Any, SimpleNamespace(metadata=None, node_id="n3"))
        assert not new.agreed.is_locked(), "nobody could initialise a cluster"

    asyncio.run(play())


def test_a_node_that_joins_a_cluster_without_users_is_not_locked(tmp_path: Path) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        new = AccessNode(world, "n3", joins=True)
        assert not new.agreed.is_locked()

    asyncio.run(play())


def test_a_node_without_a_cluster_changes_nothing_over_its_port(tmp_path: Path) -> None:
    """Its local users could else give themselves a token of the cluster that it joins later."""

    async def play() -> None:
        world = AccessWorld(tmp_path)
        new = AccessNode(world, "n3", joins=True)
        new.agreement._incarnation = "anotherdisk"
        assert "belongs to no cluster yet" in refusal(await world.play(new.add("mallory")))
        assert not (tmp_path / "n3" / "access.json").exists()

    asyncio.run(play())


def test_older_nodes_keep_files_of_their_own(tmp_path: Path) -> None:
    """A node of an earlier version stops at an entry that it does not know."""

    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1, n2, _ = world.processes.values()
        n1.older = ["n3"]
        await world.play(n1.add("ada"))
        await world.play(n1.agreed.follow())
        assert n1.users() == {"ada"}
        assert n1.agreement.current() is None
        n1.older = []
        # One that was not met may be of an earlier version.
        del n1.context.features["n3"]
        await world.play(n1.agreed.follow())
        assert n1.agreement.current() is None
        n1.context.features["n3"] = ""
        await world.settle()
        assert n2.users() == {"ada"}
        n1.older = ["n3"]
        assert "upgrade all nodes first" in refusal(await world.play(n1.add("eve")))

    asyncio.run(play())


def test_a_start_does_not_go_back_to_users_before_those_of_its_file(tmp_path: Path) -> None:
    """The log of Raft is applied again from a snapshot on: a removed token must not count again."""

    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1 = world.processes["n1"]
        await world.play(n1.add("ada"))
        await world.play(n1.add("eve"))
        before = world.nodes.stores["n1"].metadata
        await world.play(n1.agreed.change(remove_user("eve")))
        await world.settle()
        n1 = world.start("n1")
        n1.agreement._context = cast(Any, SimpleNamespace(metadata=before, node_id="n1"))
        n1.agreement.is_ready = False
        await n1.agreed.follow()
        assert n1.users() == {"ada"}
        # A whole cluster that was put back to that time follows the metadata.
        n1.agreement.is_ready = True
        await n1.agreed.follow()
        assert n1.users() == {"ada", "eve"}

    asyncio.run(play())


def test_a_file_of_another_cluster_is_adopted(tmp_path: Path) -> None:
    async def play() -> None:
        one, two = AccessWorld(tmp_path / "one"), AccessWorld(tmp_path / "two")
        await one.play(one.processes["n1"].add("ada"))
        await two.play(two.processes["n1"].add("eve"))
        content = offline(one, "n1").read()
        assert content.agreed is not None
        own = AccessData(users=content.users, agreed=content.agreed)
        made = merged(own, two.processes["n1"].credentials.own, "another")
        assert set(made.users) == {"ada", "eve"}

    asyncio.run(play())


def test_a_file_that_cannot_be_written_keeps_no_removed_user(tmp_path: Path) -> None:
    async def play() -> None:
        world = AccessWorld(tmp_path)
        n1, n2, _ = world.processes.values()
        await world.play(n1.add("ada"))
        await world.play(n1.add("eve"))
        await world.settle()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        n2.credentials.file._replace = fail  # type: ignore[method-assign]
        await world.play(n1.agreed.change(remove_user("eve")))
        await world.settle()
        assert n2.users() == {"ada"}
        del n2.credentials.file._replace  # type: ignore[method-assign]
        await world.settle()
        assert set(offline(world, "n2").read().users) == {"ada"}

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_change_cut_and_restart_agree(tmp_path: Path, seed: int) -> None:
    """Confirmed users are everywhere at the end, removed ones are nowhere, and no node has
    anything else."""

    async def play() -> None:
        rng = random.Random(seed)
        world = AccessWorld(tmp_path)
        confirmed: set[str] = set()
        unsure: set[str] = set()
        for number in range(25):
            name = rng.choice(list(world.processes))
            process = world.processes[name]
            kind = rng.random()
            user = f"u{number}"
            if kind < 0.35:
                (found,) = await world.play(process.add(user))
                (confirmed if found is None else unsure).add(user)
            elif kind < 0.5 and confirmed:
                user = rng.choice(sorted(confirmed))
                (found,) = await world.play(process.agreed.change(remove_user(user)))
                confirmed.discard(user)
                if found is not None:
                    unsure.add(user)
            elif kind < 0.6:
                offline(world, name).change(add_user(user, "admin", HASH, 0))
                process.credentials.refresh()
                confirmed.add(user)
            elif kind < 0.75:
                world.nodes.cut = {rng.choice(list(world.processes))} - world.nodes.cut
            elif kind < 0.85:
                world.nodes.start(name)
                world.start(name)
            await world.play(process.agreed.follow())
            world.nodes.run(rng.choice((0.05, 0.5, 3.0)))
        world.nodes.cut = set()
        await world.settle()
        await world.settle()
        first, *others = world.all_users()
        assert all(each == first for each in others)
        assert confirmed <= first <= confirmed | unsure

    asyncio.run(play())


def test_packed_users() -> None:
    data = AccessData(
        users={"ada": StoredUser("admin", HASH, 1)},
        tokens={"1": StoredToken("viewer", "0" * 64, 1, note="spark")},
    )
    packed = pack(data, USERS_BYTES_MAX)
    assert unpack(packed) == data
    for cut in (packed[:-1], packed + b"x", b"", b"x"):
        with pytest.raises(AccessError, match="the users of the cluster"):
            unpack(cut)
    many = {
        f"{number:x}": StoredToken("viewer", random.randbytes(32).hex(), 1)
        for number in range(30_000)
    }
    with pytest.raises(AccessError, match="are possible"):
        pack(AccessData(tokens=many), USERS_BYTES_MAX)


def test_metadata_with_and_without_users_of_either_kind() -> None:
    metadata = founded(1).stores["n1"].metadata
    assert metadata is not None
    some = AgreedUsers(7, b"x")
    for users in (None, some):
        for access in (None, some):
            made = replace(metadata, users=users, access=access)
            assert decode_metadata(encode_metadata(made)) == made
    assert b"\n" not in encode_metadata(metadata), "an older version reads it"
    assert encode_metadata(replace(metadata, users=some)).count(b"\n") == 1


def test_what_the_file_marks() -> None:
    agreed = AccessData(
        users={"a": StoredUser("admin", HASH, 1), "b": StoredUser("viewer", HASH, 1)}
    )
    own = taken(AccessData(), agreed, "c1", 5, None)
    assert own.users == agreed.users
    assert own.agreed is not None
    assert (own.agreed.cluster, own.agreed.version, own.agreed.users) == ("c1", 5, [])
