"""`holdfast cluster` against a real admin port, with a cluster behind it that the test makes up."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.cluster.plan import PlannedMoves, plan_lines
from holdfast.cli.cluster.status import ClusterStatus, changes
from holdfast.cli.main import main
from holdfast.log.partition import partition_of
from tests.e2e.brokers import SOURCE
from tests.support.fake_cluster import FakeCluster, admin_port
from tests.support.ports import free_port


class Cli:
    def __init__(self, port: int, capsys: pytest.CaptureFixture[str]) -> None:
        self.address = f"127.0.0.1:{port}"
        self._capsys = capsys
        self.output = ""
        self.errors = ""

    def __call__(self, *arguments: str) -> int:
        code = main(["cluster", *arguments, "--admin", self.address])
        self.output, self.errors = self._capsys.readouterr()
        return code

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.output)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def cli(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with admin_port(cluster) as port:
        yield Cli(port, capsys)


def test_status_of_a_healthy_cluster(cli: Cli) -> None:
    assert cli("status") == 0
    assert cli.lines[0] == "healthy: 3 nodes, 6 partitions, all with 3 in sync"
    assert cli.lines[1] == (
        "cluster c-1, metadata led by n1, version 7, replication factor 3, at least 2 in sync,"
        " as n1 sees it"
    )
    assert " ".join(cli.lines[2].split()) == (
        "node state role votes link version leaders replicas in sync clients peers admin"
    )
    assert cli.lines[3].split() == (
        [
            "n1",
            "up",
            "data",
            "yes",
            "self",
            "-",
            "2",
            "6",
            "6",
            "10.0.0.1:1883",
            "10.0.0.1:21883",
            "-",
        ]
    )
    assert len(cli.lines) == 6


def test_columns_are_aligned(cluster: FakeCluster, cli: Cli) -> None:
    cluster.nodes[1]["leaders"] = 123_456_789
    cli("nodes")
    starts = [line.find("10.0.0.") for line in cli.lines[2:]]
    assert starts == [cli.lines[1].index("clients")] * 3


def test_status_as_json(cluster: FakeCluster, cli: Cli) -> None:
    cluster.fields["new in a later version"] = 1
    assert cli("status", "--json") == 0
    text = "healthy: 3 nodes, 6 partitions, all with 3 in sync"
    assert cli.json == cluster.status() | {"healthy": True, "verdict": text}
    cli("nodes", "--json")
    assert cli.json == cluster.nodes
    cli("partitions", "--json")
    assert cli.json == cluster.partitions


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"initialised": False}, "no cluster yet: n1 waits for `holdfast cluster init`"),
        ({"metadata_leader": ""}, "degraded: the metadata has no leader"),
        ({"under_replicated": 2}, "degraded: 2 partitions under-replicated"),
        (
            {"under_replicated": 4, "leaderless": 1},
            "degraded: 1 partition without a leader; 4 partitions under-replicated",
        ),
        (
            {"below_min_insync": 4},
            "degraded: QoS 1 and 2 publishes to 4 partitions are refused: fewer than 2 replicas in"
            " sync",
        ),
        ({"waits_s": 2.5}, "degraded: publishes at n1 wait for longer than 2 s"),
    ],
)
def test_verdicts(cluster: FakeCluster, cli: Cli, fields: dict[str, Any], expected: str) -> None:
    cluster.fields |= fields
    for command in ("status", "nodes", "partitions"):
        assert cli(command) == 1
        assert cli.lines[0] == expected
    assert cli("status", "--json") == 1
    assert (cli.json["healthy"], cli.json["verdict"]) == (False, expected)


def test_a_lost_majority_has_its_own_words_and_exit_code(cluster: FakeCluster, cli: Cli) -> None:
    cluster.fields |= {"has_majority": False, "metadata_leader": "", "leaderless": 1}
    text = "no majority: n1 acknowledges nothing, and knows no news of the others"
    for command in ("status", "nodes", "partitions"):
        assert cli(command) == 3
        assert cli.lines[0] == f"{text}; 1 partition without a leader"


def test_verdicts_about_nodes(cluster: FakeCluster, cli: Cli) -> None:
    cluster.nodes[1] |= {"state": "down", "connected": False}
    cluster.nodes[2] |= {"connected": False}
    assert cli("status") == 1
    assert cli.lines[0] == "degraded: n2 is down; n1 has no link to n3"


def test_zones_and_a_pause_are_shown(cluster: FakeCluster, cli: Cli) -> None:
    cluster.nodes[2]["zone"] = "b"
    cluster.fields |= {"paused": True, "under_zoned": 2}
    assert cli("status") == 0
    paused = "moves of replicas are paused, 2 partitions with too many replicas in one zone"
    assert cli.lines[0].endswith(f"all with 3 in sync, {paused}")
    assert cli.lines[2].split()[:4] == ["node", "state", "role", "zone"]
    assert [line.split()[3] for line in cli.lines[3:6]] == ["-", "-", "b"]
    cluster.fields |= {"under_replicated": 2}
    assert cli("status") == 1
    assert cli.lines[0].endswith("2 partitions under-replicated; moves of replicas are paused")


def test_the_moves_of_a_plan_are_lines() -> None:
    sizes = {"n2": 1_500_000_000, "n1": 20}
    lines = [*plan_lines(PlannedMoves(2, 1, 1, sizes, 3700.2, True, 3))]
    assert lines[:4] == [
        "1 replica being copied",
        "2 replicas to copy, 1 leadership to move",
        "n1 receives 20 B",
        "n2 receives 1.5 GB",
    ]
    assert lines[4].startswith("copied in about 1:01:40 at catch_up_bytes_per_s, until ")
    assert lines[5:] == [
        "moves are paused: `holdfast cluster resume` begins them",
        "3 partitions with too many replicas in one zone",
    ]
    assert [*plan_lines(PlannedMoves(0, 0, 0, {}, 0.0, False, 0))] == [
        "no data is copied, and no leadership moves"
    ]


def test_a_link_through_another_node_is_no_defect(cluster: FakeCluster, cli: Cli) -> None:
    cluster.nodes[2]["through"] = "n2"
    assert cli("status") == 0
    assert cli.lines[0].endswith("all with 3 in sync, n1 reaches n3 through n2")
    assert cli.lines[5].split()[:8] == ["n3", "up", "data", "yes", "through", "n2", "-", "2"]
    before = msgspec.convert(cluster.status(), ClusterStatus)
    cluster.nodes[2]["through"] = ""
    now = msgspec.convert(cluster.status(), ClusterStatus)
    assert changes(before, now) == ["link to n3 no longer through another node"]
    assert changes(now, before) == ["link to n3 through n2"]


def test_moving_and_draining_are_no_defect(cluster: FakeCluster, cli: Cli) -> None:
    cluster.fields["moving"] = 3
    cluster.nodes[2]["state"] = "draining"
    assert cli("status") == 0
    assert cli.lines[0] == (
        "healthy: 3 nodes, 6 partitions, all with 3 in sync, 3 getting new replicas, n3 draining"
    )


def test_a_node_that_knows_nobody_yet(cluster: FakeCluster, cli: Cli) -> None:
    cluster.fields |= {"initialised": False, "cluster_id": "", "metadata_leader": ""}
    cluster.nodes.clear()
    cluster.partitions.clear()
    assert cli("status") == 1
    assert cli.lines == ["no cluster yet: n1 waits for `holdfast cluster init`"]
    assert cli("partitions", "--topic", "t") == 2
    assert cli.errors == "holdfast: no cluster yet: n1 waits for `holdfast cluster init`\n"


def test_partitions(cluster: FakeCluster, cli: Cli) -> None:
    cluster.partitions[5] |= {"leader": "", "in_sync": ["n3"], "adding": ["n4"]}
    assert cli("partitions") == 0
    assert len(cli.lines) == 8
    assert cli.lines[2].split() == ["0", "n1", "1", "n1", "n2", "n3", "n1", "n2", "n3", "-", "0"]
    assert cli.lines[7].split() == ["5", "nobody", "1", "n3", "n1", "n2", "n3", "n4", "500"]


@pytest.mark.parametrize("topic", ["a/b", "größe/°C", "$SYS/x"])
def test_the_partition_of_a_topic(cluster: FakeCluster, cli: Cli, topic: str) -> None:
    number = partition_of(topic.encode(), 6)
    leader = ["n1", "n2", "n3"][number % 3]
    assert cli("partitions", "--topic", topic) == 0
    assert cli.lines[0] == f"{topic} is in partition {number}, led by {leader}"
    assert cli.lines[2].split()[:2] == [str(number), leader]
    assert cli("partitions", "--json", "--topic", topic) == 0
    assert cli.json == [cluster.partitions[number]]
    cluster.partitions[number]["leader"] = ""
    cli("partitions", "--topic", topic)
    assert cli.lines[0] == f"{topic} is in partition {number}, which has no leader"


@pytest.mark.parametrize("topic", ["", "a/#", "+", "a\0b"])
def test_what_is_no_topic(cli: Cli, topic: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("partitions", "--topic", topic)
    assert ended.value.code == 2


def test_init(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("init") == 0
    assert cluster.asked == ["init"]
    assert cli.output == (
        "cluster c-1 made, n1 is its first node; those that name it in --join come to it\n"
    )
    cluster.refusal = "n1 belongs to cluster c-1 already"
    assert cli("init") == 2
    assert cli.errors == "holdfast: n1 belongs to cluster c-1 already\n"


def test_rebalance(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("rebalance", "--json") == 0
    assert (cluster.asked, cli.json) == (["rebalance"], {"accepted": True})


def test_drain_waits_until_the_node_holds_nothing(cluster: FakeCluster, cli: Cli) -> None:
    node = cluster.nodes[1]

    def go_on(asked: str) -> None:
        node["state"] = "draining"

    def step() -> None:
        if node["leaders"]:
            node["leaders"] -= 1
        elif node["replicas"]:
            node["replicas"] -= 3

    cluster.after = go_on
    plain = cluster.status
    looks = 0

    def status() -> dict[str, object]:
        nonlocal looks
        found = json.loads(json.dumps(plain()))
        if cluster.asked:
            looks += 1
            if looks > 1:  # The first one is the audit's.
                step()
        assert isinstance(found, dict)
        return found

    cluster.status = status  # type: ignore[method-assign]
    assert cli("drain", "n2") == 0
    assert cluster.asked == ["drain n2"]
    assert cli.output == "n2 is drained: it leads nothing and holds no replica, and has no client\n"
    assert cli.errors.splitlines() == [
        "n2 leads 2 partitions, holds 6 replicas",
        "n2 leads 1 partition, holds 6 replicas",
        "n2 leads 0 partitions, holds 6 replicas",
        "n2 leads 0 partitions, holds 3 replicas",
    ]


def test_drain_that_is_not_finished(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("drain", "n2", "--timeout", "0", "--json") == 1
    text = "not drained within 0 s, and still at it: n2 leads 2 partitions, holds 6 replicas"
    assert cli.json == {"node": "n2", "done": False, "left": text}
    assert cli.errors == ""


def test_drain_without_waiting(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("drain", "n2", "--no-wait") == 0
    assert (cluster.asked, cli.output) == (["drain n2"], "n2 is being drained\n")


def test_a_node_that_is_none(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("undrain", "n9") == 2
    assert cli.errors == "holdfast: there is no node n9: the cluster has n1, n2, n3\n"
    assert cluster.asked == []


def test_undrain(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("undrain", "n2") == 2
    assert cli.errors == "holdfast: n2 is not being drained, it is up\n"
    cluster.nodes[1]["state"] = "draining"
    assert cli("undrain", "n2") == 0
    assert cluster.asked == ["undrain n2"]


def test_remove(cluster: FakeCluster, cli: Cli) -> None:
    assert cli("remove", "n2") == 0
    assert (cluster.asked, cli.output) == (["remove n2"], "n2 removed\n")
    cluster.refusal = "n2 is up and still holds 6 partitions: drain it first"
    assert cli("remove", "n2") == 2
    assert cli.errors == "holdfast: n2 is up and still holds 6 partitions: drain it first\n"


def test_loss_must_be_accepted(cluster: FakeCluster, cli: Cli) -> None:
    cluster.fields |= {"leaderless": 2, "lost": 1}
    assert cli("status") == 1
    assert cli.lines[0] == (
        "degraded: 2 partitions without a leader; 1 of them lost: see"
        " `holdfast cluster unsafe-recover --help`"
    )
    assert cli("unsafe-recover", "n3") == 2
    assert "say so with --accept-loss" in cli.errors
    assert cluster.asked == []
    assert cli("unsafe-recover", "n3", "--accept-loss") == 0
    assert cluster.asked == ["unsafe-recover n3"]


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(free_port(), capsys)
    commands = [("status",), ("nodes",), ("partitions",), ("rebalance",), ("watch",)]
    for command in (*commands, ("init", "--wait", "0")):
        assert cli(*command) == 2
        assert f"nothing listens on {cli.address}" in cli.errors
        assert cli.output == ""


def test_init_waits_for_a_node_that_has_just_been_started(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    cli = Cli(port, capsys)
    over = threading.Event()

    def serve() -> None:
        with admin_port(cluster, port):
            over.wait()

    thread = threading.Timer(0.5, serve)
    thread.start()
    try:
        assert cli("init", "--wait", "60") == 0
    finally:
        over.set()
        thread.join()
    assert cluster.asked == ["init"]
    assert cli.output.startswith("cluster c-1 made")
    waiting = f"nothing listens on {cli.address} yet: waiting for up to 60 s\n"
    assert cli.errors in (waiting, "")


def test_init_waits_no_longer_than_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(free_port(), capsys)
    assert cli("init", "--wait", "0.3", "--json") == 2
    assert cli.errors.startswith(f"holdfast: nothing listens on {cli.address}: is the node running")
    assert cli.errors.endswith(" (waited for 0.3 s, see --wait)\n")


@pytest.mark.parametrize("text", ["-1", "nan", "soon", "inf"])
def test_what_is_no_time_to_wait(cli: Cli, text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("init", f"--wait={text}")
    assert ended.value.code == 2


def test_a_standby(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(None) as port:
        cli = Cli(port, capsys)
        assert cli("status") == 2
        assert "this node stands by: ask the holder of the lease" in cli.errors


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "has closed the connection"),
        (b"\x10\x00garbage\r\n\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", "HTTP 404: is that the admin"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{}[]", "does not understand"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a":"b"}', "does not understand"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", "has closed the connection"),
        (b'HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\n["x"', "HTTP 500"),
    ],
)
def test_something_else_listens(
    answer: bytes, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        cli = Cli(server.getsockname()[1], capsys)
        assert cli("status") == 2
        thread.join()
    assert expected in cli.errors
    assert "Traceback" not in cli.errors


def test_a_change_that_nobody_confirms(cli: Cli) -> None:
    """It may have been made."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        cli.address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cli("init") == 2
        thread.join()
    assert cli.errors.endswith(": look at the status whether it was done\n")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", ":18083", "1.2.3.4:", "ftp://h:1", "h:99999", "h:0", "h:x"]
)
def test_addresses_that_are_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(1, capsys)
    cli.address = address
    assert cli("status") == 2
    said = f"holdfast: --admin {address!r}: give ADDR:PORT, as 127.0.0.1:18083"
    assert cli.errors == f"{said}, or https://ADDR:PORT\n"


def test_a_directory_and_a_cluster_are_two_things(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("status", "--data", str(tmp_path)) == 2
    assert "give --admin for a cluster, or --data for a shared directory" in cli.errors
    monkeypatch.chdir(tmp_path)
    assert cli("status") == 0
    # Without either: the shared directory in the usual place, where there is one.
    (tmp_path / "holdfast-data" / "lease").mkdir(parents=True)
    assert main(["cluster", "status"]) == 2
    assert cli("status") == 0


@contextmanager
def watching(port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and the lines it has printed so far."""
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "holdfast.cli.main", "cluster", "watch", *options],
            *["--admin", f"127.0.0.1:{port}"],
        ],
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], lines: list[str], text: str) -> list[str]:
    """The lines up to one with `text` in it, without their times.

    A busy machine may keep the node of a test from responding within 2 s. What the command says of
    that, and of the end of it, is left out unless it is what `text` asks for.
    """
    assert process.stdout is not None
    found: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line or not ("does not answer within" in line or "answers again" in line):
            found.append(line.rstrip("\n").split(" ", 1)[1])
        if text in line:
            return found
    raise AssertionError(f"ended before {text!r}:\n{''.join(lines)}")


def test_watch(cluster: FakeCluster) -> None:
    with admin_port(cluster) as port, watching(port) as (process, lines):
        assert read_until(process, lines, "healthy") == [
            "healthy: 3 nodes, 6 partitions, all with 3 in sync"
        ]
        new = json.loads(json.dumps(cluster.partitions))
        for partition in new:
            partition["in_sync"] = ["n1", "n3"]
        new[1] |= {"leader": "n3", "epoch": 4}
        nodes = json.loads(json.dumps(cluster.nodes))
        nodes[1] |= {"state": "down", "connected": False}
        with cluster.changing:
            cluster.partitions, cluster.nodes = new, nodes
        assert read_until(process, lines, "degraded") == [
            "node n2 down",
            "link to n2 lost",
            "partition 1 leader n2 -> n3 epoch 4",
            "partitions 0-5 in sync -n2",
            "degraded: n2 is down",
        ]
        cluster.nodes = nodes[:1] + nodes[2:]
        assert read_until(process, lines, "healthy") == [
            "node n2 removed",
            "healthy: 2 nodes, 6 partitions, all with 2 in sync",
        ]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_watch_goes_to_another_node_and_back() -> None:
    first, second = FakeCluster("n1"), FakeCluster("n2")
    port = free_port()
    servers = ExitStack()
    with servers, ExitStack() as others, ExitStack() as processes:
        servers.enter_context(admin_port(first, port))
        address = f"127.0.0.1:{others.enter_context(admin_port(second))}"
        first.nodes[1]["admin_address"] = address
        process, lines = processes.enter_context(watching(port))
        read_until(process, lines, "healthy")
        second.fields["metadata_leader"] = "n2"
        servers.close()
        assert read_until(process, lines, "metadata") == [
            f"nothing listens on 127.0.0.1:{port}: is the node running, and is that its --admin?",
            f"asking n2 at {address} now",
            "metadata leader n1 -> n2",
        ]
        servers.enter_context(admin_port(first, port))
        others.close()
        assert read_until(process, lines, "metadata")[1:] == [
            f"asking n1 at 127.0.0.1:{port} now",
            "metadata leader n2 -> n1",
        ]
        servers.close()
        assert "nothing listens" in read_until(process, lines, "nothing")[0]
        servers.enter_context(admin_port(first, port))
        assert read_until(process, lines, "again") == [f"127.0.0.1:{port} answers again"]


def test_watch_as_json(cluster: FakeCluster) -> None:
    with admin_port(cluster) as port, watching(port, "--json") as (process, _):
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["text"] == "healthy: 3 nodes, 6 partitions, all with 3 in sync"
        assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_many_partitions_in_few_words() -> None:
    before, now = (status_of(FakeCluster(partitions=12)) for _ in range(2))
    changed = [0, 1, 2, 5, 7, 8]
    partitions = [
        msgspec.structs.replace(each, replicas=["n1", "n4"], in_sync=["n1"])
        if each.partition in changed
        else each
        for each in now.partitions
    ]
    now = msgspec.structs.replace(now, partitions=partitions)
    assert changes(before, now) == [
        "partitions 0-2 5 7-8 in sync -n2 -n3",
        "partitions 0-2 5 7-8 replicas +n4 -n2 -n3",
    ]
    assert changes(now, now) == []


def status_of(cluster: FakeCluster) -> ClusterStatus:
    return msgspec.convert(cluster.status(), ClusterStatus)


def test_the_leaders_of_a_failed_node_are_one_line(cluster: FakeCluster) -> None:
    before = msgspec.convert(cluster.status(), ClusterStatus)
    moved = [
        msgspec.structs.replace(each, leader="n3" if each.partition % 2 else "n2", epoch=9)
        for each in before.partitions
    ]
    lines = changes(before, msgspec.structs.replace(before, partitions=moved))
    (line,) = [each for each in lines if "leader" in each]
    assert line.startswith("6 partitions leader n1 -> n2 (")
    same = [msgspec.structs.replace(each, leader="n9", epoch=9) for each in before.partitions[:2]]
    start = [msgspec.structs.replace(each, leader="n1") for each in before.partitions[:2]]
    two = msgspec.structs.replace(before, partitions=start)
    assert changes(two, msgspec.structs.replace(two, partitions=same)) == [
        "partitions 0-1 leader n1 -> n9"
    ]
