"""Data directories that went back: one node, or all of them, put back from copies."""

import contextlib
import io
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.io.disk.older_copy import REMEMBERED
from holdfast.node.replicate.disk_position import DiskMemory
from holdfast.protocol.mqtt.reasons import NO_MATCHING_SUBSCRIBERS, QUOTA_EXCEEDED
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import Wire

pytestmark = pytest.mark.timeout(600)
"""Eight processes start in one test, some after others, which takes minutes on a busy machine."""

SETTINGS = {"cluster": {"partitions": 12}, "log": {"segment_bytes": 1 << 16}}
TOPICS = 24


def publish(cluster: ClusterProcesses, name: str, text: str) -> set[bytes]:
    """Returns the payloads. One message to each topic, each acknowledged, if need be at the second
    attempt: where a node with a longer history takes over, a partition may have too few in sync for
    a moment."""
    payloads = set()
    with Wire(cluster.nodes[name].port, timeout_s=20.0) as writer:
        writer.connect(f"writer-{name}")
        for number in range(TOPICS):
            payload = f"{text} by {name} {number} ".encode() + b"x" * 300
            topic = f"t/{number}"
            until(lambda: is_taken(writer, topic, payload), f"{text} {number}")  # noqa: B023
            payloads.add(payload)
    return payloads


def is_taken(writer: Wire, topic: str, payload: bytes) -> bool:
    reason = writer.publish(topic, payload, 1)
    assert reason in (0, NO_MATCHING_SUBSCRIBERS, QUOTA_EXCEEDED), hex(reason)
    return reason != QUOTA_EXCEEDED


def committed(cluster: ClusterProcesses, name: str) -> set[bytes]:
    """Payloads on the disk of the node that it has written down as committed, which it does about
    every second."""
    data = str(cluster.nodes[name].data)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["log", "dump", data, "--json", "--full", "--kind", "message"]) == 0
    return {json.loads(line)["payload"].encode() for line in out.getvalue().splitlines()}


def wait_all_have(cluster: ClusterProcesses, payloads: set[bytes]) -> None:
    """Every node has everything that was acknowledged."""
    for name in cluster.nodes:
        wait_has(cluster, name, payloads)


def wait_has(cluster: ClusterProcesses, name: str, payloads: set[bytes]) -> None:
    """The log is read again only when the node has written down that more is committed."""
    written: bytes | None = None
    missing = payloads

    def has_all() -> bool:
        nonlocal written, missing
        now = watermarks(cluster, name)
        if now != written:
            written = now
            missing = payloads - committed(cluster, name)
        return not missing

    try:
        until(has_all, f"{name} has all")
    except AssertionError as error:
        error.add_note(f"missing: {[each[:40] for each in missing]}")
        raise


def watermarks(cluster: ClusterProcesses, name: str) -> bytes:
    """What the node has written down as committed; about every second."""
    file = cluster.nodes[name].data / "watermarks"
    return file.read_bytes() if file.exists() else b""


def publish_until_told(cluster: ClusterProcesses, *names: str) -> set[bytes]:
    """Until the others remember more of these disks than is on them now: what a node tells with
    each heartbeat. It writes it down once in ten heartbeats at most, so twice is late enough."""
    payloads = set()
    for text in ("between", "more between"):
        written = {name: watermarks(cluster, name) for name in names}
        payloads |= publish(cluster, "n1", text)
        until(lambda: all(watermarks(cluster, name) != written[name] for name in names), text)  # noqa: B023
    return payloads


def wait_all_vote(cluster: ClusterProcesses) -> None:
    until(lambda: all(each["voter"] for each in cluster.status()["nodes"]), "all vote")


def copy(cluster: ClusterProcesses, name: str) -> Path:
    data = cluster.nodes[name].data
    kept = data.with_name("copy")
    # What is being written under such a name gets another one, maybe before it is copied.
    shutil.copytree(data, kept, ignore=shutil.ignore_patterns("*.tmp"))
    return kept


def put_back(cluster: ClusterProcesses, name: str, kept: Path) -> None:
    data = cluster.nodes[name].data
    shutil.rmtree(data)
    kept.rename(data)


def test_a_node_put_back_from_an_older_copy_catches_up(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        payloads = publish(cluster, "n1", "before")
        assert cluster.stop("n3") == 0
        kept = copy(cluster, "n3")
        cluster.restart("n3")
        cluster.wait_healthy()
        payloads |= publish(cluster, "n1", "between")
        payloads |= publish(cluster, "n3", "between")
        assert cluster.stop("n3") == 0
        put_back(cluster, "n3", kept)
        cluster.restart("n3")
        until(lambda: "older_copy" in cluster.nodes["n3"].log_text(), "n3 notices")
        cluster.wait_healthy()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)

        def agree() -> bool:
            """Leaders may still go back to their places."""
            return len({cluster.status(name).get("version") for name in cluster.nodes}) == 1

        until(agree, "one metadata")
        assert not list(tmp_path.glob("*/data/damaged"))


def test_a_machine_put_back_while_the_others_run(tmp_path: Path) -> None:
    """As a snapshot of a virtual machine: nothing was stopped in good order."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        payloads = publish(cluster, "n1", "before")
        kept = copy(cluster, "n2")
        for round_ in range(4):
            payloads |= publish(cluster, "n1", f"between {round_}")
        cluster.kill9("n2")
        put_back(cluster, "n2", kept)
        cluster.restart("n2")
        until(lambda: "older_copy" in cluster.nodes["n2"].log_text(), "n2 notices")
        cluster.wait_healthy()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


def records_ever(kept: Path) -> int:
    """The number of records that were ever on the disk of a copy."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["log", "inspect", "--json", str(kept)]) == 0
    newest = json.loads(out.getvalue())["segments"][-1]
    return int(newest["sequence"] + newest["records"])


def records_remembered(cluster: ClusterProcesses, name: str, other: str) -> int:
    """The number of records of another node's disk that the node has written down."""
    file = cluster.nodes[name].data / REMEMBERED
    memory = DiskMemory()
    assert not file.exists() or memory.load(file.read_bytes())
    return memory.positions[other][1].written if other in memory.positions else 0


@pytest.mark.long
def test_copies_of_different_moments_wait_for_an_operator(tmp_path: Path) -> None:
    """Snapshots of machines that run, n3 last: it remembers more of the other disks than they have
    now. n3 alone is no majority, so the cluster waits until one of them is accepted."""
    earlier = ("n2", "n1")
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        wait_all_vote(cluster)
        payloads = publish(cluster, "n1", "before")
        wait_all_have(cluster, payloads)
        stop = threading.Event()

        def load() -> None:
            with Wire(cluster.ports["n3"], timeout_s=20.0) as writer:
                writer.connect("load")
                number = 0
                while not stop.is_set():
                    writer.publish(f"t/{number % TOPICS}", b"load %d" % number, 1)
                    number += 1

        thread = threading.Thread(target=load)
        thread.start()
        kept = {}
        try:
            for name in (*earlier, "n3"):
                kept[name] = copy(cluster, name)
                copied = records_ever(kept[name])
                later = cluster.nodes.keys() - kept.keys()
                until(
                    lambda: all(records_remembered(cluster, each, name) > copied for each in later),  # noqa: B023
                    f"{', '.join(later)} remember more of {name}",
                )
        finally:
            stop.set()
            thread.join()
        cluster.kill9(*cluster.nodes)
        for name, each in kept.items():
            put_back(cluster, name, each)
        cluster.restart(*cluster.nodes)
        until(lambda: all(cluster.status(name).get("older_copy") for name in earlier), "refused")
        for name, node in cluster.nodes.items():
            status, body = node.admin("/readyz")
            assert status == 503, (name, body)
            assert ("accept-older-copy" in body) == (name in earlier), (name, body)
            assert "begins_anew" not in node.log_text()
        cluster.stop("n1")
        accept(cluster, "n1")
        cluster.restart("n1")
        # n1 and n3 are a majority, whose changes let n2 in.
        cluster.wait_healthy()
        assert "older_copy_begins_anew" in cluster.nodes["n2"].log_text()
        assert "begins_anew" not in cluster.nodes["n3"].log_text()
        cluster.await_generation()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


def test_a_node_that_is_refused_makes_no_second_cluster(tmp_path: Path) -> None:
    """Two are named n2: neither the wish for a cluster nor a restart makes one of the second."""
    with ClusterProcesses(tmp_path, 2, SETTINGS | {"cluster": {"partitions": 4}}) as cluster:
        first = cluster.nodes["n1"]
        second = ClusterNode(tmp_path / "again", "n2", cluster.secret_file, cluster.settings)
        second.join = [first.peer_address]
        second.start()
        try:
            until(lambda: bool(second.cluster().get("refused_by")), "it knows who refuses it")
            assert "cluster_awaited" in second.log_text()
            (refusal,) = second.cluster()["refused_by"]
            assert first.peer_address in refusal
            assert "another node is connected as n2" in refusal
            status, body = second.admin("/cluster/init", "POST")
            assert status == 409, body
            assert refusal in body
            assert not second.cluster()["initialised"]
            assert cluster.is_healthy()
        finally:
            second.kill()


def test_an_empty_directory_in_place_of_the_last_copy(tmp_path: Path) -> None:
    """As of a disk that is not mounted: nothing is given up before an operator says so."""
    settings = {"cluster": {"partitions": 4, "replication_factor": 2, "min_insync": 1}}
    with ClusterProcesses(tmp_path, 3, settings, witnesses=1) as cluster:
        node = cluster.nodes["n2"]
        payloads = publish(cluster, "n1", "before")
        wait_all_vote(cluster)
        cluster.kill9("n1")
        cluster.wait_healthy(without=["n1"])
        payloads |= publish(cluster, "n2", "what n1 lacks")
        cluster.kill9("n2")
        mounted = node.data.with_name("mounted")
        node.data.rename(mounted)
        cluster.restart("n1", "n2")
        until(lambda: bool(node.cluster().get("refused_by")), "the empty one is refused")
        assert "than the last one in sync" in node.cluster()["refused_by"][0]
        assert node.admin("/cluster/init", "POST")[0] == 409
        until(lambda: cluster.status("n1").get("lost") == 4, "n1 says so")
        assert all(each["in_sync"] == ["n2"] for each in cluster.status("n1")["partitions"])
        cluster.kill9("n2")
        shutil.rmtree(node.data)
        mounted.rename(node.data)
        cluster.restart("n2")
        cluster.wait_healthy()
        wait_has(cluster, "n1", payloads)


def test_an_empty_directory_is_let_in_when_an_operator_says_so(tmp_path: Path) -> None:
    settings = {"cluster": {"partitions": 4, "replication_factor": 2, "min_insync": 1}}
    with ClusterProcesses(tmp_path, 3, settings, witnesses=1) as cluster:
        wait_all_vote(cluster)
        cluster.kill9("n1")
        cluster.wait_healthy(without=["n1"])
        cluster.kill9("n2")
        shutil.rmtree(cluster.nodes["n2"].data)
        cluster.restart("n1", "n2")
        until(lambda: cluster.status("n1").get("lost") == 4, "n1 says so")

        def is_given_up() -> bool:
            """Not before n1 counts as up."""
            answer = cluster.nodes["n1"].admin(
                "/cluster/unsafe-recover?node=n1&accept_loss=true", "POST"
            )
            answers.append(answer)
            return answer[0] == 200

        answers: list[tuple[int, str]] = []
        try:
            until(is_given_up, "what n2 had is given up", 20)
        except AssertionError as error:
            error.add_note(f"{answers[-1]} {cluster.status('n1')}")
            raise
        cluster.wait_healthy()
        # Offsets of what was given up are assigned again.
        cluster.await_generation()


def accept(cluster: ClusterProcesses, name: str) -> None:
    """The operator's decision."""
    data = str(cluster.nodes[name].data)
    assert main(["cluster", "accept-older-copy", "--data", data, "--accept-loss"]) == 0


@pytest.mark.long
def test_a_majority_put_back_waits_for_the_one_that_runs(tmp_path: Path) -> None:
    """It remembers their disks, and lets one in that an operator has accepted. All go on with what
    it has. Either may come back first (`tests/model/test_cluster_put_back.py`)."""
    order = ("n2", "n3")
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        wait_all_vote(cluster)
        payloads = publish(cluster, "n1", "before")
        kept = {name: copy(cluster, name) for name in order}
        payloads |= publish_until_told(cluster, *order)
        cluster.kill9(*order)
        for name, each in kept.items():
            put_back(cluster, name, each)
        # The first is refused before the second is there.
        for name in order:
            cluster.restart(name)
            until(lambda: cluster.status(name).get("older_copy"), f"{name} is refused")  # noqa: B023
        assert all(cluster.nodes[name].readiness() == 503 for name in order)
        assert all("begins_anew" not in cluster.nodes[name].log_text() for name in order)
        cluster.stop(order[0])
        # One of them and n1 are a majority, so nothing is agreed without n1.
        accept(cluster, order[0])
        cluster.restart(order[0])
        cluster.wait_healthy(without=order[1:])
        # The other one says that it stands apart, and need not be started again.
        cluster.wait_healthy()
        cluster.await_generation()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


@pytest.mark.long
def test_one_of_two_that_come_back_was_put_back(tmp_path: Path) -> None:
    """n3: it waits for n2, which is whole. Either may come first
    (`tests/model/test_cluster_put_back.py`)."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        wait_all_vote(cluster)
        payloads = publish(cluster, "n1", "before")
        kept = copy(cluster, "n3")
        payloads |= publish_until_told(cluster, "n3")
        cluster.kill9("n2", "n3")
        put_back(cluster, "n3", kept)
        cluster.restart("n3")
        until(lambda: "older_copy" in cluster.nodes["n3"].log_text(), "n3 is refused")
        cluster.restart("n2")
        cluster.wait_healthy()
        assert "older_copy_begins_anew" in cluster.nodes["n3"].log_text()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


def test_an_older_copy_waits_after_all_lost_power(tmp_path: Path) -> None:
    """n1 has refused n3, and both lose power. n1 remembers it, and n3 knows that it waits."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        wait_all_vote(cluster)
        payloads = publish(cluster, "n1", "before")
        kept = copy(cluster, "n3")
        payloads |= publish_until_told(cluster, "n3")
        cluster.kill9("n2", "n3")
        put_back(cluster, "n3", kept)
        cluster.restart("n3")
        until(lambda: cluster.status("n3").get("older_copy"), "n3 is refused")
        cluster.kill9("n1", "n3")
        cluster.restart("n1", "n3")
        node = cluster.nodes["n3"]
        until(lambda: cluster.status("n3").get("older_copy"), "n3 still waits")
        assert "older_copy_begins_anew" not in node.log_text()
        assert node.readiness() == 503
        cluster.restart("n2")
        cluster.wait_healthy()
        assert "older_copy_begins_anew" in node.log_text()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)
        assert all("replica_diverged" not in each.log_text() for each in cluster.nodes.values())


def test_one_node_comes_long_after_all_were_put_back(tmp_path: Path) -> None:
    """The others have gone on without what it has."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        publish(cluster, "n1", "before")
        wait_all_vote(cluster)
        kept = {name: copy(cluster, name) for name in ("n1", "n2")}
        lost = publish(cluster, "n1", "between")
        assert cluster.stop("n3") == 0
        cluster.kill9("n1", "n2")
        for name, each in kept.items():
            put_back(cluster, name, each)
        cluster.restart("n1", "n2")
        cluster.wait_healthy(without=["n3"])
        publish(cluster, "n1", "others")
        publish(cluster, "n1", "others")
        cluster.restart("n3")
        node = cluster.nodes["n3"]
        cluster.wait_healthy()
        until(lambda: (node.data / "diverged-1" / "journal").exists(), "what it had is kept")
        until(lambda: '"set_aside":["diverged-1"]' in node.admin("/readyz")[1], "it is reported")
        for name in cluster.nodes:
            publish(cluster, name, "after")
        command = ["cluster", "diverged", "publish", "--data", str(node.data)]
        assert main([*command, "--server", f"127.0.0.1:{node.port}"]) == 0
        wait_all_have(cluster, lost)


def test_a_node_with_replaced_metadata_waits_for_a_majority_without_it(tmp_path: Path) -> None:
    """n1 and n2 have replaced changes that n3 knows as committed. n2 alone cannot agree to
    anything, so n3 keeps its votes and its metadata until n1 is back."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        publish(cluster, "n1", "before")
        wait_all_vote(cluster)
        kept = {name: copy(cluster, name) for name in ("n1", "n2")}
        cluster.kill9("n3")
        cluster.wait_healthy(without=["n3"])
        cluster.restart("n3")
        cluster.wait_healthy()
        assert cluster.stop("n3") == 0
        cluster.kill9("n1", "n2")
        for name, each in kept.items():
            put_back(cluster, name, each)
        cluster.restart("n1", "n2")
        cluster.wait_healthy(without=["n3"])
        payloads = publish(cluster, "n1", "others")
        cluster.kill9("n1")
        cluster.restart("n3")
        node = cluster.nodes["n3"]
        until(lambda: "it waits until" in node.log_text(), "n3 stands apart")
        assert "another change" in cluster.status("n3")["older_copy"]
        assert "begins_anew" not in node.log_text()
        cluster.restart("n1")
        cluster.wait_healthy()
        assert "older_copy_begins_anew" in node.log_text()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


def test_the_only_voter_decides_nothing_on_an_older_copy(tmp_path: Path) -> None:
    """The other node alone has the newest records. It must stay in sync to lead with them."""
    settings = {"cluster": {"partitions": 4, "replication_factor": 2, "min_insync": 1}}
    with ClusterProcesses(tmp_path, 2, SETTINGS | settings) as cluster:
        payloads = publish(cluster, "n1", "before")
        kept = copy(cluster, "n1")
        payloads |= publish_until_told(cluster, "n1")
        cluster.kill9("n1")
        put_back(cluster, "n1", kept)
        cluster.restart("n1")
        node = cluster.nodes["n1"]
        until(lambda: cluster.status("n1").get("older_copy"), "n1 is refused")
        until(lambda: "node_suspected node='n2'" in node.log_text(), "n1 misses n2")
        assert not cluster.status("n1")["metadata_leader"]
        assert all(set(each["in_sync"]) == {"n1", "n2"} for each in cluster.status()["partitions"])
        assert cluster.stop("n1") == 0
        assert cluster.stop("n2") == 0
        # A stop decides nothing: n1 alone would go on without what only n2 has.
        cluster.restart("n1")
        until(lambda: cluster.status("n1").get("older_copy"), "n1 still stands apart")
        assert cluster.nodes["n1"].readiness() == 503
        assert cluster.stop("n1") == 0
        accept(cluster, "n1")
        cluster.restart("n2")
        cluster.restart("n1")
        cluster.wait_healthy()
        cluster.await_generation()
        for name in cluster.nodes:
            payloads |= publish(cluster, name, "after")
        wait_all_have(cluster, payloads)


def test_the_only_voter_put_back_acknowledges_nothing_before_it_meets_the_other(
    tmp_path: Path,
) -> None:
    """It is a majority by itself, and the copy says that it is alone in sync. The other node, which
    knows better, is slow to answer."""
    settings = {"cluster": {"partitions": 4, "min_insync": 1}}
    with ClusterProcesses(tmp_path, 2, settings) as cluster:
        voters = [each["node"] for each in cluster.status()["nodes"] if each["voter"]]
        (voter,) = voters
        (other,) = cluster.nodes.keys() - {voter}
        cluster.stop(other)

        def is_alone() -> bool:
            return all(each["in_sync"] == [voter] for each in cluster.status(voter)["partitions"])

        until(is_alone, "the voter is alone in sync")
        assert cluster.stop(voter) == 0
        kept = copy(cluster, voter)
        cluster.restart(voter, other)
        cluster.wait_healthy()
        publish(cluster, voter, "after the copy")
        assert cluster.stop(voter) == 0
        put_back(cluster, voter, kept)
        cluster.pause(other)
        node = cluster.nodes[voter]
        node.launch()
        node.await_ready()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            # Until the node has met the other one it does not even listen.
            with contextlib.suppress(OSError), Wire(node.port, timeout_s=1.0) as writer:
                writer.connect("early")
                assert writer.publish("t/1", b"early", 1) not in (0, NO_MATCHING_SUBSCRIBERS)
            time.sleep(0.02)
        cluster.resume(other)
        until(lambda: "older_copy" in node.log_text(), "the voter notices")
        assert node.readiness() != 200
