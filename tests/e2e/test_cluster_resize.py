"""One broker that grows to three nodes under load, loses its first node, and is one again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import Holdfast
from tests.e2e.rolling_traffic import rolling_traffic
from tests.support.ports import free_port
from tests.support.waiting import until


class Member(Holdfast):
    """A broker with more options on its command line."""

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory)
        self.options = options

    def command(self) -> list[str]:
        return [*super().command(), *self.options]

    def cluster(self) -> dict[str, Any]:
        """The status of the cluster; empty while it does not answer."""
        try:
            found: dict[str, Any] = json.loads(self.admin("/cluster")[1])
        except OSError:
            return {}
        return found

    def has(self, nodes: int, factor: int, least: int) -> bool:
        """Whether the cluster has these nodes, all up, and has reached this replication."""
        found = self.cluster()
        return (
            [each["state"] for each in found.get("nodes", ())] == ["up"] * nodes
            and (found["replication_factor"], found["min_insync"]) == (factor, least)
            and found["replication"]["waits_for"] == ""
            and found["moving"] == 0
        )

    def operate(self, *arguments: str) -> int:
        return main(["cluster", *arguments, "--admin", f"127.0.0.1:{self.admin_port}"])


@contextmanager
def members(directory: Path) -> Iterator[list[Member]]:
    """The first node, and two that join it. None is started."""
    address = f"127.0.0.1:{free_port()}"
    found = [
        Member(directory / "1", "--peer-bind", address),
        Member(directory / "2", "--join", address),
        Member(directory / "3", "--join", address),
    ]
    try:
        yield found
    except BaseException as error:
        error.add_note("\n".join(each.log_text()[-4000:] for each in found))
        raise
    finally:
        for each in found:
            each.kill()


@pytest.mark.timeout(600)
def test_one_broker_grows_to_three_nodes_and_is_one_again(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        first, *others = found
        # It has begun without a port for other nodes.
        alone = Member(first.directory)
        alone.start()
        assert alone.cluster()["replication"]["automatic"]
        assert alone.stop() == 0
        first.start()
        servers = [f"127.0.0.1:{each.port}" for each in found]
        with rolling_traffic(servers, [servers, servers[::-1]]) as traffic:
            traffic.start()
            for count, member, (factor, least) in zip(
                (2, 3), others, ((2, 1), (3, 2)), strict=True
            ):
                traffic.wait()
                member.start()
                until(
                    lambda count=count, factor=factor, least=least: first.has(count, factor, least),
                    f"{count} nodes",
                )
            until(lambda: sum(each["voter"] for each in first.cluster()["nodes"]) == 3, "voters")
            traffic.wait()
            assert first.operate("resize", "--replication-factor", "4") == 2
            one = ("--replication-factor", "1", "--min-insync", "1")
            # Nobody is asked without a terminal, and --yes is missing.
            assert first.operate("resize", *one) == 2
            assert first.operate("resize", *one, "--dry-run", "--json") == 0
            assert first.has(3, 3, 2)
            assert first.operate("resize", *one, "--yes", "--timeout", "120") == 0
            assert first.has(3, 1, 1)
            traffic.wait()
            assert first.operate("resize", "auto", "--timeout", "120") == 0
            assert first.has(3, 3, 2)
            traffic.wait()
            first.kill()
            traffic.wait()
            first.start()
            until(lambda: first.has(3, 3, 2), "n1 is back")
            traffic.wait()
            for count, member in ((2, others[1]), (1, others[0])):
                name = member.cluster()["node"]
                assert first.operate("drain", name, "--timeout", "120") == 0
                assert first.operate("remove", name) == 0
                assert member.stop() == 0
                until(lambda count=count: first.has(count, count, 1), f"{count} nodes")
                traffic.wait()
        text = first.log_text()
        assert "replication factor=3 min_insync=2 wanted_factor=3 wanted_min_insync=2" in text
        assert "Traceback" not in text


def refused(member: Member) -> str:
    """The one line with which a start ends."""
    with pytest.raises(RuntimeError):
        member.start()
    [line] = [line for line in member.log_text().splitlines() if "CRITICAL" in line]
    return line


def test_a_node_that_cannot_join_leaves_nothing_behind(tmp_path: Path) -> None:
    with members(tmp_path) as (first, second, third):
        for options in (("--node-id", "a1"), (*first.options, "--node-id", "a1")):
            first.kill()
            first.options = options
            first.start()
        other = Member(tmp_path / "other")
        other.start()
        assert other.stop() == 0
        stranger = Member(other.directory, *second.options)
        before = written(other.data)
        assert "belongs to the cluster" in refused(stranger)
        assert written(other.data) == before

        secret = tmp_path / "secret"
        secret.write_text("another secret of the tests, long enough\n")
        secret.chmod(0o600)
        for settings, options, text in (
            ({"cluster": {"partitions": 5}}, (), "cluster.partitions = 5: the cluster has 16"),
            ({}, ("--node-id", "a1"), "is a1, too: set node.id"),
            ({}, ("--cluster-secret-file", str(secret)), "secret"),
        ):
            third.settings = settings
            third.options = (*second.options, *options)
            third.log.unlink(missing_ok=True)
            assert text in refused(third)
            assert not third.data.exists()
        assert first.has(1, 1, 1)


def written(data: Path) -> list[tuple[Path, int]]:
    """The files that matter, and when each was written."""
    names = [each for each in data.rglob("*") if each.is_file() and each.name != "lock"]
    return sorted((each, each.stat().st_mtime_ns) for each in names)
