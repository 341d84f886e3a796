"""Federators in one event loop: real sockets and files, and a scripted broker at each."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from holdfast.config.problem import ConfigError
from holdfast_federation.core.effects import Message
from holdfast_federation.core.messages.custody import PROBING
from holdfast_federation.core.policy import OPEN, LinkPolicy
from holdfast_federation.sidecar.federator import Federator, FederatorError
from holdfast_federation.sidecar.sidecar_settings import link_policy, member_config
from holdfast_federation.sidecar.store.file import MemberStoreError, StoreFile
from holdfast_federation.sidecar.store.member_files import MemberFiles
from tests.support.cutting_proxy import CuttingProxy
from tests.support.federation_settings import member_settings
from tests.support.ports import free_port
from tests.support.scripted_edge import SECRET, ScriptedEdge, Site, until


def run(tmp_path: Path, test: Callable[[Site], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with Site(tmp_path) as site:
            await asyncio.wait_for(test(site), 100)

    uvloop.run(limited())


async def wanted(edge: ScriptedEdge, *filters: str) -> None:
    await until(lambda: edge.wanted == frozenset(filters), f"{filters} are wanted")


async def arrived(edge: ScriptedEdge, count: int) -> None:
    await until(lambda: len(edge.delivered) == count, f"{count} messages")


async def confirmed(federator: Federator) -> None:
    await until(lambda: not len(federator.member.custody), "confirmations")


def test_messages_go_where_they_are_wanted(tmp_path: Path) -> None:
    """Over a relay, in order, with all that belongs to a message."""

    async def test(site: Site) -> None:
        origin, relay, here, other = (
            ScriptedEdge(),
            ScriptedEdge(),
            ScriptedEdge(["a/#"]),
            ScriptedEdge(["b/+"]),
        )
        # Without a third link of their own making there is one way only.
        site.config = replace(site.config, degree_min=1)
        middle = await site.start("relay", relay)
        first = await site.start("origin", origin, ["relay"])
        last = await site.start("here", here, ["relay"])
        await site.start("other", other, ["relay"])
        await wanted(origin, "a/#", "b/+")
        await wanted(here, "b/+")
        done = [origin.publish(f"{number}", qos=number % 3) for number in range(300)]
        origin.publish("for nobody", "c", 1)
        message = Message("a/2", b"\xff\0", 2, True, b"\x01\x01", 30.0)
        origin.host.publish(message, asyncio.Event().set)
        await until(lambda: len(here.delivered) == 301, "all")
        assert here.payloads_of("a/1", least_qos=1) == [str(n) for n in range(300) if n % 3]
        assert here.payloads_of("a/1", most_qos=0) == [str(n) for n in range(300) if not n % 3]
        id, message_here, place = here.delivered[-1]
        assert (id.node, id.epoch) == (first.node, 1)
        assert message_here.delivered_id == id
        assert message_here.expiry_s is not None
        assert 0 < message_here.expiry_s <= 30.0
        assert replace(message_here, delivered_id=None, expiry_s=30.0, stamp=0) == message
        assert place == 201
        assert all(event.is_set() for event in done)
        assert relay.delivered == other.delivered == []
        await confirmed(first)
        assert middle.counters.data_frames > 300
        assert last.counters.hops == {2: 301}
        status = first.status()
        assert status["members"] == 4
        assert status["interest"] == {"local": 0, "remote": 2}
        assert first.mesh("a/1").members == (last.node,)

    run(tmp_path, test)


def test_interest_comes_and_goes(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge()
        await site.start("here", here)
        await site.start("origin", origin, ["here"])
        assert origin.publish("too early").is_set(), "nobody's, so done at once"
        here.host.change_interest(["a/1", "x/#"], [])
        await wanted(origin, "a/1", "x/#")
        here.host.change_interest([], ["x/#"])
        await wanted(origin, "a/1")
        origin.publish("now")
        await until(lambda: here.payloads() == ["now"], "it")
        assert not origin.publish("$", "$SYS/x").is_set() or here.payloads() == ["now"]

    run(tmp_path, test)


def test_what_a_client_wanted_before_the_start_is_announced_first(tmp_path: Path) -> None:
    """The first announcement of an epoch has it: no message is missed in between."""

    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        sender = await site.start("origin", origin)
        receiver = await site.start("here", here, ["origin"])
        await wanted(origin, "a/#")
        for round in range(5):
            await site.stop(receiver)
            before = sender.member.remote_version
            origin.publish(f"{round}")
            receiver = await site.start("here", here, ["origin"])
            await until(lambda round=round: here.payloads()[-1:] == [str(round)], "it")  # type: ignore[misc]
            assert sender.member.remote_version == before
            assert origin.wanted == {"a/#"}
        assert here.payloads() == [str(round) for round in range(5)]

    run(tmp_path, test)


def test_a_broker_that_is_away_gets_it_later(tmp_path: Path) -> None:
    """Nothing is confirmed to the origin before the broker has it, and QoS 0 does not wait."""

    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"], is_up=False)
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        for number in range(20):
            await asyncio.wait_for(origin.publish(f"{number}").wait(), 60)
        origin.publish("lost", qos=0)
        await until(lambda: receiver.counters.dropped == {"edge down": 1}, "its loss")
        assert here.delivered == []
        assert len(sender.member.custody) == 20
        here.holds = True
        here.host.edge_up()
        # No more come without a confirmation when publishing took longer than `retry_s`.
        await until(lambda: len(here.delivered) >= PROBING, "the first ones")
        for done in here.held[:5]:
            done()
        here.host.edge_down("test")
        here.held.clear()
        here.delivered.clear()
        here.holds = False
        here.host.edge_up()
        await confirmed(sender)
        assert here.payloads() == [str(number) for number in range(5, 20)]

    run(tmp_path, test)


def test_custody_survives_a_restart_of_both(tmp_path: Path) -> None:
    """What was done comes once, however often either end starts anew."""

    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        number = 0
        for _ in range(4):
            await site.stop(receiver)
            for _ in range(30):
                await asyncio.wait_for(origin.publish(f"{number}").wait(), 60)
                number += 1
            await site.stop(sender)
            sender = await site.start("origin", origin, ["here"])
            assert len(sender.member.custody) == 30
            assert origin.wanted == {"a/#"}
            receiver = await site.start("here", here)
            for _ in range(5):
                origin.publish(f"{number}")
                number += 1
            await arrived(here, number)
            await confirmed(sender)
        assert here.payloads() == [str(one) for one in range(number)]

    run(tmp_path, test)


def test_expiry_goes_on_while_a_member_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        await site.stop(receiver)
        for expiry_s in (60.0, 1000.0):
            done = asyncio.Event()
            origin.host.publish(Message("a/1", b"%d" % expiry_s, 1, expiry_s=expiry_s), done.set)
            await asyncio.wait_for(done.wait(), 60)
        await site.stop(sender)
        clock = StoreFile.clock
        monkeypatch.setattr(StoreFile, "clock", staticmethod(lambda: clock() + 100))
        sender = await site.start("origin", origin, ["here"])
        await site.start("here", here)
        await until(lambda: here.delivered, "what is left")
        await confirmed(sender)
        [(_, message, _)] = here.delivered
        assert message.payload == b"1000"
        assert message.expiry_s is not None
        assert message.expiry_s <= 900

    run(tmp_path, test)


def test_queues_that_wait(tmp_path: Path) -> None:
    """With `when_full` = wait nothing is lost, `done` waits, and the order stays."""

    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        site.config = replace(site.config, queue_messages_max=10)
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"], when_full="wait")
        await wanted(origin, "a/#")
        await site.stop(receiver)
        done = [origin.publish(f"{number}") for number in range(25)]
        await until(lambda: sum(event.is_set() for event in done) == 10, "room for ten")
        custody = sender.status()["custody"]
        assert isinstance(custody, dict)
        assert custody["held"] == 15
        assert origin.publish("free", "b/1").is_set() is False, "it would overtake"
        await site.start("here", here)
        await until(lambda: all(event.is_set() for event in done), "the rest")
        await until(lambda: len(here.delivered) == 25, "all")
        assert here.payloads() == [str(number) for number in range(25)]
        assert sender.counters.dropped == {}

    run(tmp_path, test)


def test_queues_that_drop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the oldest go, counted and told; `done` comes for every message."""

    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        site.config = replace(site.config, queue_messages_max=10)
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        await site.stop(receiver)
        await until(lambda: not sender.links.linked(), "its end")
        done = [origin.publish(f"{number}") for number in range(500)]
        await until(lambda: all(event.is_set() for event in done), "done")
        assert sender.counters.dropped == {"queue full": 490}
        assert caplog.text.count(f"messages for {receiver.node.hex()} are lost: queue full") == 1
        await site.start("here", here)
        await until(lambda: len(here.delivered) == 10, "the newest")
        assert here.payloads() == [str(number) for number in range(490, 500)]

    caplog.set_level(logging.WARNING)
    run(tmp_path, test)


def test_a_copy_of_a_directory(tmp_path: Path) -> None:
    """The older one finds out, says what to do, and the next start of it works."""

    async def test(site: Site) -> None:
        site.config = replace(site.config, dial_every_s=0.05)
        await site.start("here", ScriptedEdge())
        edge = ScriptedEdge(["a/#"])
        for _ in range(3):
            member = await site.start("origin", edge, ["here"])
            await until(lambda member=member: member.links.linked(), "a link")  # type: ignore[misc]
            await site.stop(member)
        identity = tmp_path / "origin" / "identity"
        identity.write_text(f"{member.node.hex()} 1\n")
        old = await site.start("origin", edge, ["here"])
        error = await asyncio.wait_for(old.failed(), 60)
        assert "others know start 3 of member" in str(error)
        assert "Start again" in str(error)
        await site.stop(old)
        new = await site.start("origin", edge, ["here"])
        assert new.epoch == 4
        await until(lambda: new.links.linked(), "a link")

    run(tmp_path, test)


def test_a_store_that_fails_stops_confirming(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        await asyncio.wait_for(origin.publish("1").wait(), 60)
        state = sender._state
        assert isinstance(state, MemberFiles)
        assert state._store is not None
        connection = state._store._file._connection
        assert connection is not None
        # One thread at a time has it: the store is idle here.
        await until(lambda: not sender.store.waiting() and here.delivered, "quiet")
        await asyncio.get_running_loop().run_in_executor(
            state._store._executor, lambda: connection.execute("DROP TABLE custody")
        )
        done = origin.publish("2")
        error = await asyncio.wait_for(sender.failed(), 60)
        assert isinstance(error.__cause__, MemberStoreError) or "damaged" in str(error)
        assert "nothing is confirmed any more" in str(error)
        assert not done.is_set()
        assert here.payloads() == ["1"]

    run(tmp_path, test)


def test_a_link_is_cut_at_any_byte(tmp_path: Path) -> None:
    """And comes back: nothing is lost, nothing comes twice, the order stays."""

    async def test(site: Site) -> None:
        rng = random.Random(4)
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        # A link that flaps may be used again soon.
        site.config = replace(site.config, degree_min=0, flaps_free=1000)
        await site.start("here", here)
        port = int(site.address("here").rpartition(":")[2])

        def cut_after() -> tuple[int | None, int | None]:
            return rng.randint(500, 6000), rng.randint(500, 6000)

        async with CuttingProxy(port, cut_after) as proxy:
            peers = [f"127.0.0.1:{proxy.port}"]
            sender = await site.start("origin", origin, peers=peers)
            await wanted(origin, "a/#")
            for number in range(1000):
                origin.publish(f"{number}", qos=1 + number % 2)
                if not number % 50:
                    await asyncio.sleep(0.02)
            await arrived(here, 1000)
            await confirmed(sender)
            assert proxy.cuts > 5
        assert here.payloads() == [str(number) for number in range(1000)]

    run(tmp_path, test)


def test_what_keeps_it_from_starting(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        async def refusal(**settings: object) -> str:
            edge = ScriptedEdge()
            with pytest.raises(FederatorError) as caught:
                await Federator(site.settings("x", (), **settings), edge).start()
            assert edge.stopped == (edge._host is not None)
            return str(caught.value)

        holder = await site.start("holder", ScriptedEdge())
        assert "in use by another process" in await refusal(data=str(tmp_path / "holder"))
        taken = site.address("holder")
        assert f"{taken}: Address already in use" in await refusal(listen=taken)
        assert "there is no such file" in await refusal(secret_file=str(tmp_path / "none"))
        weak = tmp_path / "weak"
        weak.write_text("short")
        weak.chmod(0o600)
        assert "it needs 32" in await refusal(secret_file=str(weak))
        (tmp_path / "file").write_text("")
        assert f"{tmp_path}/file" in await refusal(data=str(tmp_path / "file"))
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "federation.db").write_text("no database" * 1000)
        assert "damaged" in await refusal(data=str(tmp_path / "broken"))
        await site.stop(holder)
        # Each of them has let go of what it had.
        again = Federator(site.settings("x"), ScriptedEdge())
        await again.start()
        await again.stop()

    run(tmp_path, test)


def test_a_secret_of_the_federation(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "other").write_text(SECRET.replace("a", "b"))
        for name in ("secret", "other"):
            (tmp_path / name).chmod(0o600)
        origin, here, stranger = ScriptedEdge(), ScriptedEdge(["a/#"]), ScriptedEdge(["#"])
        secret = str(tmp_path / "secret")
        member = await site.start("here", here, secret_file=secret)
        await site.start("origin", origin, ["here"], secret_file=secret)
        other = await site.start("x", stranger, ["here"], secret_file=str(tmp_path / "other"))
        await wanted(origin, "a/#")
        await until(lambda: member.links.metrics.refused.get("secret", 0) >= 3, "refusals")
        origin.publish("1")
        await until(lambda: here.payloads() == ["1"], "it")
        assert stranger.delivered == []
        assert len(other.member.database.entries) == 1
        assert len(member.member.database.entries) == 2

    run(tmp_path, test)


def test_leaving_is_for_good(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        receiver = await site.start("here", here)
        sender = await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        site.running.remove(receiver)
        await receiver.leave()
        await wanted(origin)
        assert origin.publish("nobody's").is_set()
        assert not len(sender.member.custody)

    run(tmp_path, test)


def test_large_messages(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
        await site.start("here", here)
        await site.start("origin", origin, ["here"])
        await wanted(origin, "a/#")
        text = "x" * (20 << 20)
        done = [origin.publish(text), origin.publish("small")]
        await until(lambda: len(here.delivered) == 2, "both")
        assert here.payloads() == [text, "small"]
        assert all(event.is_set() for event in done)

    run(tmp_path, test)


def test_settings_say_what_is_wrong() -> None:
    for table, text in (
        ({"listen": "here"}, 'federation.listen = "here": must be host:port'),
        ({"lisen": "a:1"}, "did you mean federation.listen?"),
        ({"peers": ["a"]}, 'federation.peers[0] = "a": must be host:port or id@host:port'),
        ({"listen": "0.0.0.0:7883", "secret_file": "s"}, "set advertise"),
        ({"listen": "192.0.2.1:7883"}, "set secret_file, or certificate, key and ca"),
        ({"certificate": "c"}, "needs key and ca too"),
        ({"export_filters": ["a/#/b"]}, "'#' must be the last character"),
        ({"import_filters": ["$share/g/a"]}, "shared subscription"),
        ({"manager": "nowhere", "broker": "tcp://b:1883"}, "must be a URL as http://host:8080"),
        ({"manager": "http://m:8080"}, "needs broker"),
        ({"manager": "http://m:8080", "broker": "b"}, "must be a URL as tcp://host:1883"),
        ({"manager_ca": "x"}, "needs manager"),
        ({"manager_certificate": "c"}, "needs manager"),
        ({"manager": "https://m", "broker": "tcp://b", "manager_key": "k"}, "go together"),
        (
            {
                "manager": "http://m",
                "broker": "tcp://b",
                "manager_certificate": "c",
                "manager_key": "k",
            },
            "begins with https://",
        ),
        ({"labels": ["x"]}, "write name=value"),
        ({"capacity": 1}, "at least 2 neighbours"),
        ({"queue_messages": 0}, "federation.queue_messages = 0: must be"),
        ({"when_full": "explode"}, "must be one of"),
        ({"advertise": "a:65536"}, "the port of a:65536 must be from 1 to 65535"),
    ):
        with pytest.raises(ConfigError) as caught:
            member_settings(table)
        assert text in caught.value.problems[0], caught.value.problems
    settings = member_settings(
        {"peers": [f"{'0a' * 16}@[::1]:1", "h:2"], "listen": f"127.0.0.1:{free_port()}"}
    )
    assert settings.address == settings.listen
    assert link_policy(settings) == OPEN
    bounded = member_settings({"payload_bytes": 10, "messages_per_s": 5, "bytes_per_s": 0.5})
    assert link_policy(bounded) == LinkPolicy(
        payload_bytes_max=10, messages_per_s=5, bytes_per_s=0.5
    )
    assert member_config(settings).queue_messages_max == 100_000
    assert member_config(member_settings({"hello_s": 0.4})).probe_after_s == pytest.approx(0.41)
