"""The clocks and the disks of the other nodes, as they report them."""

from types import SimpleNamespace
from typing import Any, cast

from holdfast.log.journal.journal import Journal
from holdfast.log.record import MESSAGE, Record
from holdfast.node.failure.cluster_clock import ClusterClock
from holdfast.node.failure.health import Presence
from holdfast.node.parts import Parts
from holdfast.node.position_reports import PositionReports
from holdfast.node.replicate.disk_position import (
    FEATURE,
    DiskMemory,
    DiskPosition,
    encode_report,
    find_loss,
)
from tests.sim.disk import SimDisk
from tests.support.replica_bench import ReplicaBench

TRUE_US = 1_790_000_000_000_000
DAY_US = 86_400_000_000


def reports(
    members: list[str] | None, journal: Journal | None = None
) -> tuple[PositionReports, Any]:
    """The reports at n2, which has just started. `members` None: it does not know them yet."""
    metadata = None if members is None else SimpleNamespace(nodes=dict.fromkeys(members))
    journal = journal or Journal(1, replicated=True)
    context = SimpleNamespace(metadata=metadata, features={}, outgoing=[], journal=journal)
    meta = SimpleNamespace(node_id="n2", durable=(0, 0), log_end=(0, 0))
    replication = SimpleNamespace(review_incomplete=lambda reports, now: frozenset())
    parts = SimpleNamespace(
        context=context,
        meta=meta,
        clock=ClusterClock("n2"),
        disk_memory=DiskMemory(),
        replication=replication,
        detector=SimpleNamespace(set_incomplete=lambda node, partitions: None),
    )
    return PositionReports(cast(Parts, parts)), parts


def test_a_node_that_does_not_know_the_members_yet_takes_their_clocks() -> None:
    """The next report may come after it leads a partition. Counter-example: its own clock is years
    ahead, and ends a session at once."""
    found, parts = reports(None)
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    found.handle("n1", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    parts.clock.has_agreed = True
    assert parts.clock.tick(5.0, TRUE_US + 1000 * DAY_US) == TRUE_US


def test_a_node_waits_for_the_clock_of_another_member() -> None:
    found, _ = reports(["n1", "n2"])
    assert not found.is_awaited(), "nobody is connected"
    found.connected("n3", Presence("i", "a", features=FEATURE), 5.0)
    found.connected("n1", Presence("i", "a"), 5.0)
    assert not found.is_awaited(), "no member reports its clock"
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    assert found.is_awaited()
    found.handle("n3", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    assert found.is_awaited(), "n3 is no member"
    found.handle("n1", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    assert not found.is_awaited()


def test_a_report_of_a_node_that_is_no_member_yet_counts_when_it_is_one() -> None:
    """The next one comes REPORT_S later, and a node that starts waits for it."""
    found, parts = reports(["n2"])
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    parts.clock.tick(5.0, TRUE_US)
    found.handle("n1", encode_report(TRUE_US, TRUE_US, DiskPosition(1, 2, 3)), 5.0)
    found.review(5.1)
    assert not parts.disk_memory.positions
    parts.context.metadata.nodes["n1"] = None
    assert found.is_awaited()
    found.review(5.2)
    assert not found.is_awaited()
    assert parts.disk_memory.positions["n1"][1].records == 3
    assert parts.clock.skews_s()["n1"] == 0.0, "the clock at the time of the report"


def test_a_report_leaves_when_it_says_something_new_and_else_every_second() -> None:
    journal = Journal(1, replicated=True)
    found, parts = reports(["n1", "n2"], journal)
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    clock, sent = parts.clock, parts.context.outgoing

    def beats(times: int, now: float, wall_us: int = TRUE_US) -> int:
        sent.clear()
        for number in range(times):
            clock.tick(now + number / 10, wall_us + number * 100_000)
            found.report(now + number / 10)
        return len(sent)

    beats(1, 6.0)
    assert beats(9, 6.1, TRUE_US + 100_000) == 0
    assert beats(11, 7.01, TRUE_US + 1_010_000) == 2
    clock.has_agreed = True
    assert beats(3, 8.11, TRUE_US + 2_110_000) == 1, "the clock here counts from now on"
    journal.append(Record(0, MESSAGE, topic=b"t"))
    group = journal.close_write_group()
    assert group is not None
    journal.wrote(group)
    journal.commit(group)
    assert beats(3, 8.41, TRUE_US + 2_410_000) == 1, "the disk has another record"
    assert beats(3, 8.71, TRUE_US + DAY_US) == 1, "somebody has set the clock"


def test_records_that_were_cut_off_hide_no_lost_ones() -> None:
    """The copy has 100 records that no other node had, and that were cut off later. It lacks 90
    committed records of another partition."""
    disk = SimDisk()
    bench = ReplicaBench(disk)
    for number in range(110):
        bench.append(0 if number < 100 else 1, b"p")
    bench.flush()
    bench.journal.advance(1, 10)
    copy = disk.copy()
    bench.journal.truncate(0, 0)
    for _ in range(90):
        bench.append(1, b"p")
    bench.flush()
    bench.journal.advance(1, 100)
    memory = DiskMemory()
    memory.note("n2", "i", reports(None, bench.journal)[0].position())
    assert find_loss(memory.positions, "n2", "i", claim_of(disk)) == ""
    lost = find_loss(memory.positions, "n2", "i", claim_of(copy))
    assert lost == "90 of 200 records that were on it"


def claim_of(disk: SimDisk) -> str:
    return reports(None, ReplicaBench(disk).journal)[0].claim().text()


def test_records_that_are_synced_later_do_not_count_before() -> None:
    """A power cut may take them."""
    journal = Journal(1, replicated=True)
    found, _ = reports(None, journal)
    found.sync_later()
    for _ in range(3):
        journal.append(Record(0, MESSAGE, topic=b"t"))
    group = journal.close_write_group()
    assert group is not None
    journal.wrote(group)
    journal.commit(group)
    journal.advance(0, 2)
    assert (found.position().records, found.position().written) == (0, 0)
    assert (found.claim().records, found.claim().written) == (3, 3)
    checkpoint = journal.checkpoint()
    journal.advance(0, 3)
    found.synced = checkpoint
    assert (found.position().records, found.position().written) == (2, 3)


def test_a_disk_that_forgets_a_partition_is_no_older_copy() -> None:
    """Not at any moment while the partition is forgotten, fed from far behind, and begins again
    before where it had ended. A copy of the disk from each moment before is still found out."""
    disk = SimDisk()
    bench = ReplicaBench(disk)
    journal = bench.journal
    memory = DiskMemory()
    copies: list[SimDisk] = []

    def moment() -> None:
        bench.flush()
        bench.directory.write_watermarks(journal.checkpoint())
        found = reports(None, journal)[0]
        memory.note("n2", "i", found.position())
        for copy in copies:
            assert find_loss(memory.positions, "n2", "i", claim_of(copy))
        assert find_loss(memory.positions, "n2", "i", found.claim().text()) == ""
        assert find_loss(memory.positions, "n2", "i", claim_of(disk)) == ""
        copies.append(disk.copy())

    for number in range(100):
        bench.append(number % 2, b"p")
    bench.flush()
    journal.advance(0, 50)
    journal.advance(1, 50)
    copies.append(disk.copy())
    bench.append(0, b"q")
    moment()
    journal.forget(0)
    moment()
    for offset in (40, 5000):
        journal.place(0, offset)
        claimed = reports(None, journal)[0].position()
        assert claimed.records == 50, "fed positions are not on the disk"
    bench.append(1, b"q")
    moment()
    journal.reset(0, 10)
    moment()
    bench.append(0, b"q")
    moment()
