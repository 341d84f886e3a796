"""What a node remembers of the disks of others, and a node that goes on from an older copy."""

from pathlib import Path
from zlib import crc32

import pytest
from msgspec.structs import asdict, replace

from holdfast.cli.main import main
from holdfast.io.disk import older_copy
from holdfast.io.disk import quarantine as set_aside
from holdfast.io.disk.raft_files import RaftFiles
from holdfast.log.files.data_directory import DirectoryLock, create, read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.operations import empty_disk_text
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.older_copies import OlderCopies
from holdfast.node.raft.log import EntryKind, LogEntry, Membership
from holdfast.node.raft.node import Write
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.replicate.disk_position import (
    DiskMemory,
    DiskPosition,
    decode_position,
    decode_report,
    encode_report,
    find_loss,
)
from holdfast.security import peer_identity
from holdfast.security.peer_identity import PeerIdentity

KNOWN = DiskPosition(term=5, index=40, records=900, written=950)


@pytest.mark.parametrize(
    ("claimed", "lost"),
    [
        (DiskPosition(5, 40, 900, 950), ""),
        (DiskPosition(6, 41, 901, 951), ""),
        (DiskPosition(5, 40, 890, 940), "10 of 950 records that were on it"),
        (DiskPosition(5, 40, 890), "10 of 900 committed records"),
        # It has begun a partition again that it had forgotten.
        (DiskPosition(5, 40, 890, 950), ""),
        (DiskPosition(5, 38, 900, 950), "changes 39 to 40 of the metadata"),
        (DiskPosition(4, 40, 900, 950), "its votes since term 4"),
        (DiskPosition(5, 40, 910, 940), "10 of 950 records that were on it"),
        (DiskPosition(5, 40, 900), ""),
    ],
)
def test_a_disk_that_went_back(claimed: DiskPosition, lost: str) -> None:
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    assert find_loss(memory.positions, "n3", "disk1", claimed.text()) == lost


def test_a_copy_may_begin_anew_once_a_change_has_come_back_that_it_had_no_part_in() -> None:
    proposed: list[float] = []

    def propose(now: float) -> int:
        proposed.append(now)
        return len(proposed)

    def come_back() -> None:
        assert reads.proposal_done(len(proposed), RequestRefused(CHANGES_NOTHING), 0.0)

    reads = MetadataReads(propose)
    copies = OlderCopies(reads)
    earlier = reads.begin()
    reads.advance(0.0)
    assert not copies.may_restart("n3", "first", stands_apart=False)
    assert not copies.may_restart("n3", "first", stands_apart=True)
    come_back()
    # It was under way when n3 had not said that it stands apart.
    assert reads.has_passed(earlier)
    assert not copies.may_restart("n3", "first", stands_apart=True)
    reads.advance(1.0)
    # Started again meanwhile, it may have confirmed that one.
    assert not copies.may_restart("n3", "second", stands_apart=False)
    assert not copies.may_restart("n3", "second", stands_apart=True)
    come_back()
    assert not copies.may_restart("n3", "second", stands_apart=True)
    reads.advance(2.0)
    come_back()
    assert copies.may_restart("n3", "second", stands_apart=True)
    assert not copies.may_restart("n2", "second", stands_apart=True)
    copies.forget(frozenset({"n1", "n2"}))
    assert not copies.may_restart("n3", "second", stands_apart=True)


def test_another_disk_and_older_versions_claim_nothing() -> None:
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    for node, incarnation, claimed in [
        ("n3", "disk2", "0.0.0"),
        ("n2", "disk1", "0.0.0"),
        ("n3", "disk1", ""),
        ("n3", "disk1", "1.2"),
        ("n3", "disk1", "1.2.-3"),
        ("n3", "disk1", "9" * 40 + ".1.1"),
    ]:
        assert find_loss(memory.positions, node, incarnation, claimed) == ""


def test_nothing_that_was_known_is_forgotten_by_what_comes_late() -> None:
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    memory.note("n3", "disk1", DiskPosition(1, 50, 1))
    assert memory.positions["n3"] == ("disk1", DiskPosition(5, 50, 900, 950))
    memory.note("n3", "disk2", DiskPosition(1, 1, 1))
    assert memory.positions["n3"] == ("disk2", DiskPosition(1, 1, 1))
    memory.forget(frozenset({"n1"}))
    assert not memory.positions


def loss(memory: DiskMemory, claimed: DiskPosition, incarnation: str = "disk1") -> str:
    return find_loss(memory.positions, "n3", incarnation, claimed.text(), memory.generations)


def test_a_memory_is_the_same_after_a_restart() -> None:
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    memory.begin_generation(77)
    memory.note("n2", "disk7", KNOWN)
    again = DiskMemory()
    assert again.load(memory.encode())
    assert again.positions == memory.positions
    assert again.generations == [0, 77]
    assert loss(again, replace(KNOWN, written=940))


def test_a_damaged_memory_counts_as_none() -> None:
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    content = memory.encode()
    changed = [
        content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in range(len(content) - 1)
    ]
    other = [b"", b"\n", b"{}\n", content[:-3], content[1:], b"[]\n%08x\n" % crc32(b"[]")]
    for damaged in changed + other:
        again = DiskMemory()
        assert not again.load(damaged)
        assert again.positions == {}


def test_what_was_given_up_in_a_later_generation_is_not_missed() -> None:
    """n3 was accepted with less while this node was down. A copy from before that is refused."""
    memory = DiskMemory()
    memory.note("n3", "disk1", KNOWN)
    less = replace(KNOWN, written=940)
    assert loss(memory, less)
    assert loss(memory, replace(less, generation=77)) == ""
    memory.begin_generation(77)
    assert loss(memory, replace(less, generation=77)) == ""
    memory.note("n3", "disk1", less)
    assert loss(memory, replace(less, generation=77)) == ""
    assert loss(memory, replace(less, written=930, generation=77))
    assert loss(memory, replace(less, written=930))


def test_the_generations_that_are_remembered_have_a_bound() -> None:
    memory = DiskMemory()
    for number in range(1, 100):
        memory.begin_generation(number)
        memory.begin_generation(number)
    assert memory.generations == [0, *range(91, 100)]
    assert memory.generation == 99


def test_texts_and_frames() -> None:
    assert decode_position(KNOWN.text()) == KNOWN
    frame = encode_report(123, 456, KNOWN)
    assert decode_report(frame) == (123, 456, KNOWN, frozenset())
    of_an_older_version = DiskPosition(5, 40, 900)
    assert decode_report(frame[:-8]) == (123, 456, of_an_older_version, frozenset())
    assert encode_report(123, 456, of_an_older_version) == frame[:-8]
    assert decode_position("5.40.900") == of_an_older_version
    with pytest.raises(BadFrame):
        decode_report(frame[:-9])
    for position in (KNOWN, of_an_older_version):
        frame = encode_report(123, 456, position, (63, 0))
        for data in (frame, frame + b"of a later version"):
            assert decode_report(data) == (123, 456, position, frozenset({0, 63}))
        with pytest.raises(BadFrame):
            decode_report(frame[:-1])


def test_an_older_version_can_compare_the_disk_in_the_handshake() -> None:
    identity = PeerIdentity("n3", "disk1", disk=KNOWN.text())
    body = peer_identity.encode_identity(identity)
    assert peer_identity.json.loads(body)["disk"] == "5.40.900"
    assert peer_identity.decode_identity(body, 1) == identity


def test_an_identity_of_an_older_version_is_understood() -> None:
    fields = asdict(PeerIdentity("n1", "disk1"))
    del fields["features"], fields["disk"]
    body = peer_identity.json.dumps(fields).encode()
    assert peer_identity.decode_identity(body, 1) == PeerIdentity("n1", "disk1")


def test_texts_for_who_is_refused_fit_into_the_handshake() -> None:
    text = empty_disk_text("n" * 32, list(range(10_000, 20_000)))
    assert len(text) <= peer_identity.TEXT_CHARACTERS_MAX


def directory(root: Path) -> OsFileSystem:
    root.mkdir()
    files = OsFileSystem(root)
    create(files, Manifest("n3", 4, "", "cluster", "disk1"))
    raft = RaftFiles(files, "n3.disk1", is_new=True)
    entry = LogEntry(1, 3, EntryKind.MEMBERS, Membership(("n3.disk1",)).encode())
    raft.write(Write(3, "n3.disk1", 1, (entry,), must_sync=True))
    raft.close()
    return files


def test_a_node_on_an_older_copy_becomes_another_raft_member(tmp_path: Path) -> None:
    files = directory(tmp_path / "data")
    (tmp_path / "data/journal/1.log").write_bytes(b"kept")
    assert not older_copy.begin_anew_at(tmp_path / "data")
    older_copy.mark(files, "disk2")
    assert older_copy.begin_anew_at(tmp_path / "data")
    manifest = read_manifest(files, tmp_path)
    assert (manifest.incarnation, manifest.cluster_id) == ("disk2", "cluster")
    state = RaftFiles(files, "n3.disk2", is_new=False).state
    assert (state.term, state.vote, state.entries) == (0, "", [])
    assert (tmp_path / "data/journal/1.log").read_bytes() == b"kept"
    assert not older_copy.begin_anew_at(tmp_path / "data")


def test_a_node_stands_apart_until_it_begins_anew_or_an_operator_accepts_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = directory(tmp_path / "data")
    assert older_copy.reason_apart(files) == ""
    older_copy.stand_apart(files, "it lacks much")
    assert older_copy.reason_apart(files) == "it lacks much"
    command = ["cluster", "accept-older-copy", "--data", str(tmp_path / "data")]
    assert main(command) == 1
    assert "it lacks much. Put the newer disk back" in capsys.readouterr().err
    lock = DirectoryLock(tmp_path / "data" / "lock")
    assert main([*command, "--accept-loss"]) == 1
    assert "served by another process" in capsys.readouterr().err
    assert older_copy.reason_apart(files) == "it lacks much"
    lock.release()
    assert older_copy.nodes_given_up(files) is None
    assert main([*command, "--accept-loss", "--without", "n1", "--without", "n2"]) == 0
    assert "was rejected: it lacks much" in capsys.readouterr().out
    assert older_copy.reason_apart(files) == ""
    # The start waits for all others until the node has what they have.
    assert older_copy.nodes_given_up(files) == ["n1", "n2"]
    assert main([*command, "--accept-loss"]) == 0
    assert "was not rejected" in capsys.readouterr().out
    older_copy.stand_apart(files, "it lacks much")
    assert older_copy.mark(files, "disk2")
    assert older_copy.begin_anew_at(tmp_path / "data")
    assert older_copy.reason_apart(files) == ""
    assert older_copy.nodes_given_up(files) is None


def test_a_disk_that_takes_no_writes_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process stands apart all the same, and does not start again for nothing."""
    files = OsFileSystem(tmp_path / "missing")
    older_copy.stand_apart(files, "it lacks much")
    assert not older_copy.mark(files, "disk2")
    assert caplog.text.count("older_copy_not_marked") == 2


@pytest.mark.parametrize("steps", range(1, 6))
def test_it_is_carried_out_however_often_it_is_interrupted(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = directory(tmp_path / "data")
    older_copy.mark(files, "disk2")
    left = [steps]

    class Interrupted(Exception):
        pass

    def interrupting(name: str) -> None:
        original = getattr(OsFileSystem, name)

        def call(self: OsFileSystem, *arguments: object, **options: object) -> object:
            left[0] -= 1
            if not left[0]:
                raise Interrupted
            return original(self, *arguments, **options)

        monkeypatch.setattr(OsFileSystem, name, call)

    for name in ("remove", "rename", "open_write"):
        interrupting(name)
    with pytest.raises(Interrupted):
        older_copy.begin_anew_at(tmp_path / "data")
    monkeypatch.undo()
    assert older_copy.begin_anew_at(tmp_path / "data")
    assert RaftFiles(files, "n3.disk2", is_new=False).state.term == 0


def test_what_the_others_went_on_without_is_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal/1.log").write_bytes(b"%d" % number)
        set_aside.mark(tmp_path, keep=True)
        assert set_aside.begin_anew(tmp_path)
        assert not (tmp_path / "journal").exists()
        kept = set_aside.forget(tmp_path, [], 0)
        assert kept == tmp_path / f"diverged-{number}"
        assert (kept / "journal/1.log").read_bytes() == b"%d" % number
    assert not set_aside.exists(tmp_path)
