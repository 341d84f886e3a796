"""One example of each message between nodes of a cluster and members of a federation: see
`format_samples`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from struct import Struct
from typing import Any, Final

import msgspec
from msgspec.structs import replace as replace_struct

from holdfast.io.peers import questions
from holdfast.log.record import MESSAGE
from holdfast.node import frame_kinds as kinds
from holdfast.node import frames
from holdfast.node.admission.usage import USAGE_DECODER, UsageReport
from holdfast.node.failure.detector import Heartbeat, decode_heartbeat, encode_heartbeat
from holdfast.node.feeds import frames as feeds
from holdfast.node.frames import OWNED_DECODER, OwnedSessions
from holdfast.node.groups import codec as groups
from holdfast.node.groups import control_frames
from holdfast.node.metadata import codec as metadata
from holdfast.node.metadata import commands, model
from holdfast.node.metadata.state_machine import decode_request, encode_request
from holdfast.node.publish import forward_frames
from holdfast.node.publish.forward_frames import (
    ForwardResult,
    decode_forward,
    decode_result,
    encode_result,
)
from holdfast.node.raft import messages as raft
from holdfast.node.raft.codec import decode_message, encode_message
from holdfast.node.reads import fetch_frames, read_barrier
from holdfast.node.replicate import codec as replication
from holdfast.node.replicate.disk_position import DiskPosition, decode_report, encode_report
from holdfast.node.routing.interest_frames import (
    INTEREST_ACK_DECODER,
    INTEREST_DECODER,
    Interest,
    InterestAck,
)
from holdfast.node.runtime import relayed_links
from holdfast.node.runtime.relayed_links import decode_relayed, encode_relayed
from holdfast.node.session.message import Message
from holdfast.node.state import transfer
from holdfast.node.state.session_records import SessionEntry, WillEntry
from holdfast.security import peer_handshake as handshake
from holdfast.security.peer_identity import PeerIdentity, encode_identity
from holdfast_federation.core import frames as federation
from holdfast_federation.sidecar import links, site_names
from tests.support.format_samples import (
    ENTRIES,
    NUMBERS,
    SNAPSHOT,
    TIME_US,
    Sample,
    batch,
    disk_samples,
    expected,
    log_records,
    records_of,
)

A, B, C = (bytes((number,)) * 16 for number in (1, 2, 3))
CLUSTER: Final = "cluster-wire"
FEDERATION: Final = "federation-wire"
_HEAD: Final = Struct(">IB")


def all_samples() -> list[Sample]:
    """The examples of all formats."""
    return [*disk_samples(), *wire_samples()]


def wire_samples() -> Iterator[Sample]:
    """The examples of what crosses a link. The name of a frame begins with its kind."""
    yield from _handshakes()
    yield from _nodes()
    yield from _partitions()
    yield from _feeds()
    yield from _publishing()
    yield from _sessions()
    yield from _groups()
    yield from _raft()
    yield from _metadata()
    yield from _members()


def _frame(kind: str, name: str, value: object, data: bytes, decode: Callable[[bytes], object],
           *, is_exact: bool = True) -> Sample:  # fmt: skip
    return Sample(CLUSTER, f"{kind}.{name}", value, data, decode, is_exact)


def handshake_bytes(realm: handshake.Realm, number: int) -> dict[str, bytes]:
    """What each side of a handshake with fixed nonces says."""
    first = PeerIdentity(
        "n2", "i2", "c1", number, "data", "h2:7", "h2:1", "h2:9", "p2", "position,questions",
        "1.2.3", "s",
    )  # fmt: skip
    second = PeerIdentity("n1", "i1", "c1", number, peer_address="h1:7", process="p1")
    turn = handshake.Handshake(True, first, b"secret", b"d" * 32, lambda peer, last: None, realm)
    other = handshake.Handshake(False, second, b"secret", b"a" * 32, lambda peer, last: None, realm)
    said = {"dialler": b"", "acceptor": b""}
    side, silent = "dialler", "acceptor"
    while out := turn.take_out():
        said[side] += out
        other.receive(out)
        turn, other, side, silent = other, turn, silent, side
    assert turn.established
    assert other.established
    return said


def _handshakes() -> Iterator[Sample]:
    for name, realm in ((CLUSTER, handshake.CLUSTER), (FEDERATION, handshake.FEDERATION)):
        for side, data in handshake_bytes(realm, NUMBERS[name]).items():
            yield Sample(name, f"handshake.{side}", data, data, bytes)


def _nodes() -> Iterator[Sample]:
    beat = Heartbeat(5, 0.25, True, False, frozenset({"n2"}), True, True, {"n3": 7}, True)
    data = encode_heartbeat(beat)
    yield _frame("HEARTBEAT", "all_flags", beat, data, decode_heartbeat)
    for name, written, partitions in (
        ("all", 0, ()),
        ("written", 5, ()),
        ("incomplete", 0, (0, 9)),
    ):
        position = (TIME_US, TIME_US + 1, DiskPosition(2, 3, 4, written), frozenset(partitions))
        yield _frame("POSITION", name, position, encode_report(*position), decode_report)
    question = questions.PeerQuestion(1, "sessions", msgspec.Raw(b'{"a":1}'))
    decoder = msgspec.json.Decoder(questions.PeerQuestion)
    data = msgspec.json.encode(question)
    yield _frame("QUESTION", "all", _asked(question), data, lambda d: _asked(decoder.decode(d)))
    answer = questions.PeerAnswer(1, "no", msgspec.Raw(b"[1]"))
    answers = msgspec.json.Decoder(questions.PeerAnswer)
    data = msgspec.json.encode(answer)
    yield _frame("ANSWER", "all", _told(answer), data, lambda d: _told(answers.decode(d)))
    forwarded = relayed_links.FORWARDED
    for name, kind, body in (
        ("open", relayed_links.OPEN, b""),
        ("accept", relayed_links.ACCEPT, b"1.2.3"),
        ("confirm", relayed_links.CONFIRM | forwarded, encode_identity(PeerIdentity("n1", "i1"))),
        ("data", relayed_links.DATA | forwarded, bytes((kinds.COMMIT, 1)) + b"piece"),
        ("credit", relayed_links.CREDIT, b"\0\x08\0\0"),
        ("close", relayed_links.CLOSE, b""),
    ):
        relayed = (kind, (1 << 40) + 1, "n3", body)
        yield _frame("RELAYED", name, relayed, encode_relayed(*relayed), decode_relayed)
    interest = Interest(1, True, ["a/ä"], ["b"])
    data = msgspec.json.encode(interest)
    yield _frame("INTEREST", "all", interest, data, INTEREST_DECODER.decode)
    ack = InterestAck(7)
    yield _frame("INTEREST_ACK", "all", ack, msgspec.json.encode(ack), INTEREST_ACK_DECODER.decode)
    report = UsageReport([("address", "10.1.2.3")], [("user", "bytes", "u", 120.5)])
    yield _frame("USAGE", "all", report, msgspec.json.encode(report), USAGE_DECODER.decode)
    records = log_records()[:2]
    yield _frame("QOS0", "two", expected(records), batch(records), records_of)


def _asked(question: questions.PeerQuestion) -> object:
    return question.id, question.name, bytes(question.parameters)


def _told(answer: questions.PeerAnswer) -> object:
    return answer.id, answer.error, bytes(answer.body)


def _partitions() -> Iterator[Sample]:
    follow = (3, 2, 9, 1, 100, 90)
    data = replication.encode_follow("i1", [replication.FOLLOW_ENTRY.pack(*follow)])
    yield _frame("FOLLOW", "one", ("i1", [follow]), data, replication.decode_follow)
    answer = (3, 2, 9, replication.CUT, 1, 80, 70)
    data = replication.FOLLOW_FROM_ENTRY.pack(*answer)
    yield _frame("FOLLOW_FROM", "cut", [answer], data, replication.decode_follow_from)
    data = replication.encode_ack(5000, [replication.OFFSET_ENTRY.pack(3, 2, 95)])
    yield _frame("REPLICATE_ACK", "one", (5000, [(3, 2, 95)]), data, replication.decode_ack)
    data = replication.OFFSET_ENTRY.pack(3, 2, 94)
    yield _frame(
        "COMMIT", "one", [(3, 2, 94)], data, lambda d: replication.decode_offsets("COMMIT", d)
    )
    records = log_records()
    parts = replication.replicate_parts([replication.EPOCH.pack(6)], [batch(records)])
    yield _frame("REPLICATE", "all_kinds", [(6, expected(records))], b"".join(parts), _replicated)
    data = read_barrier.barrier_request(9)
    yield _frame("BARRIER", "one", (9, []), data, read_barrier.decode_barrier)
    data += read_barrier._RESULT.pack(3, 2, 95)
    yield _frame("BARRIER_RESULT", "one", (9, [(3, 2, 95)]), data, read_barrier.decode_barrier)
    yield from _reads()
    log_end = frames.LogEndFrame(term=7, end=(6, 42), members=["n1", "n2"])
    data = frames.encode_frame(log_end)
    yield _frame("LOG_END", "all", log_end, data, frames.LOG_END.decode)
    request = frames.ImageRequest(4, 0, [(3, 95)])
    data = frames.encode_frame(request)
    yield _frame("IMAGE_REQUEST", "first", request, data, frames.IMAGE_REQUEST.decode)
    head = transfer._HEAD.pack(4, 0, True, 1) + transfer._GRANT.pack(3, 95)
    entry = transfer._ENTRY.pack(3, 1, 7) + b"session"
    yield _frame("IMAGE", "last", ((4, 0, True, 1), (3, 95), (3, 1, 7)), head + entry, _piece)


def _reads() -> Iterator[Sample]:
    ranges = [fetch_frames.ReadRange(3, 95, 120), fetch_frames.ReadRange(4, 7, 9)]
    read = fetch_frames.FetchFrame(
        number=9,
        generation=2,
        ranges=ranges,
        records_max=500,
        bytes_max=1 << 20,
        filters=[("a/ä", -1), ("b/#", 0)],
        starts=[[100, 7]],
    )
    wanted = fetch_frames.FetchFrame(number=10, ranges=[], bytes_max=4, wanted=[(3, 95)])
    queries = [("a/+", 5, 0, []), ("a/+", 0, 3, []), ("a", 0, 0, [96, 8])]
    starts = fetch_frames.FetchFrame(number=11, ranges=ranges, queries=queries)
    for name, frame in (("read", read), ("records", wanted), ("starts", starts)):
        data = fetch_frames.encode_fetch(frame)
        yield _frame("FETCH", name, frame, data, lambda d: fetch_frames.decode_fetch(d, 8))
    records = [each for each in log_records() if each.kind == MESSAGE]
    for at, record in enumerate(records):
        record.offset = 11 + at
    fetched = fetch_frames.FetchedFrame(
        number=9, refused=[(4, fetch_frames.BELOW_START, 8)], positions=[120, 7], lost=1
    )
    (data,) = fetch_frames.encode_fetched(fetched, records)
    yield _frame("FETCHED", "read", (fetched, expected(records)), data, _fetched)
    entry = fetch_frames.StartEntry([96, 8], [("a/ä", 96)], "", 4096)
    none = fetch_frames.StartEntry([], [], "too many")
    fetched = fetch_frames.FetchedFrame(number=11, looked_at=1, starts=[entry, none])
    (data,) = fetch_frames.encode_fetched(fetched, [])
    yield _frame("FETCHED", "starts", (fetched, []), data, _fetched)


def _fetched(data: bytes) -> object:
    head, records = fetch_frames.decode_fetched(data)
    return head, expected(records)


def _feeds() -> Iterator[Sample]:
    request = feeds.FeedFrom(3, 2, 7, 90, [(5, b"c1")])
    data = feeds.encode_feed_from([request])
    yield _frame("FEED_FROM", "one", [request], data, feeds.decode_feed_from)
    requests = [feeds.FeedFrom(3, 2, 7, 90, [(5, b"c1")], 1), feeds.FeedFrom(4, 0, 8, 0)]
    data = feeds.encode_feed_from(requests)
    yield _frame("FEED_FROM", "marked", requests, data, feeds.decode_feed_from)
    records = log_records()[:2]
    parts = [
        feeds.records_part(7, 96, batch(records), [90, 95]),
        feeds.offset_part(feeds.MARK, 7, 97),
        feeds.aligned_part(7, [(5, b"c1")]),
        feeds.offset_part(feeds.BEGINS, 8, 40),
        feeds.offset_part(feeds.LACKS, 9, 20),
    ]
    sent = [
        (feeds.RECORDS, 7, 96, [90, 95], [], expected(records)),
        (feeds.MARK, 7, 97, [], [], []),
        (feeds.ALIGNED, 7, 0, [], [(5, b"c1")], []),
        (feeds.BEGINS, 8, 40, [], [], []),
        (feeds.LACKS, 9, 20, [], [], []),
    ]
    yield _frame("FEED", "all", sent, b"".join(parts), _fed)
    data = feeds.encode_feed_ack(4096)
    yield _frame("FEED_ACK", "one", 4096, data, feeds.decode_feed_ack)


def _fed(data: bytes) -> object:
    return [
        (
            each.kind,
            each.request,
            each.offset,
            list(each.offsets),
            each.tickets,
            [] if each.batch is None else records_of(each.batch.content()),
        )
        for each in feeds.decode_feed(data)
    ]


def _replicated(data: bytes) -> object:
    return [
        (epoch, records_of(each.content())) for epoch, each in replication.decode_replicate(data)
    ]


def _piece(data: bytes) -> object:
    at = transfer._HEAD.size
    return (
        transfer._HEAD.unpack_from(data),
        transfer._GRANT.unpack_from(data, at),
        transfer._ENTRY.unpack_from(data, at + transfer._GRANT.size),
    )


def _publishing() -> Iterator[Sample]:
    records = log_records()
    data = forward_frames.FORWARD_HEAD.pack(5, 1) + batch(records)
    yield _frame("FORWARD", "all_kinds", [(5, 1, expected(records))], data, _forwarded)
    result = (3, 5, 9, 0x97, "quota")
    data = encode_result([ForwardResult(*result)])
    yield _frame("FORWARD_RESULT", "refused", [result], data, _results)


def _forwarded(data: bytes) -> object:
    return [(e, a, records_of(each.content())) for e, a, each in decode_forward(data)]


def _results(data: bytes) -> object:
    found = decode_result(data)
    return [(each.partition, each.epoch, each.ticket, each.reason, each.text) for each in found]


def _sessions() -> Iterator[Sample]:
    will = WillEntry("w", b"gone", 1, True, b"\x02\x00\x00\x00\x05", 5, 3)
    session = SessionEntry(
        client="c", epoch=3, expiry_s=60, username="u", disconnected_us=TIME_US, open=False,
        subscriptions=[("a/+", 1, True, False, 2, 7, [1, 2])], inbound=[(5, 1)], cursor=b"\0" * 4,
    )  # fmt: skip
    close, owned = (
        frames.CloseFrame("c", 3),
        OwnedSessions(partitions=[0], epochs=[3], owned=[("c", 5)], asking=["d"], users={"c": "u"}),
    )
    piece = OwnedSessions(partitions=[0], owned=[("c", 5)], asking=[], follows=True, more=True)
    request = OwnedSessions(ask=True, partitions=[0], owned=[], asking=[])
    opening = frames.OpenFrame(1, "c", True, 60, "u", "v", True, will)
    opened = frames.OpenedFrame(
        request=1, client="c", epoch=3, present=True, lost=False, session=session
    )
    denied = frames.OpenedFrame(
        request=1, client="c", epoch=0, present=False, lost=False, denied=True, session=None
    )
    values: list[tuple[str, str, Any, Callable[[bytes], object]]] = [
        ("SESSION_OPEN", "will", opening, frames.OPEN.decode),
        ("SESSION_OPEN", "older", frames.OpenFrame(1, "c", False, 0, None), frames.OPEN.decode),
        ("SESSION_OPENED", "whole", opened, frames.OPENED.decode),
        ("SESSION_OPENED", "denied", denied, frames.OPENED.decode),
        ("SESSION_CLOSE", "one", close, frames.CLOSE.decode),
        ("SESSION_CLOSED", "one", close, frames.CLOSE.decode),
        ("SESSION_OWNED", "report", owned, OWNED_DECODER.decode),
        ("SESSION_OWNED", "request", request, OWNED_DECODER.decode),
        ("SESSION_OWNED", "piece", piece, OWNED_DECODER.decode),
    ]  # fmt: skip
    for kind, name, value, decode in values:
        yield _frame(kind, name, value, msgspec.json.encode(value), decode)


def _groups() -> Iterator[Sample]:
    capacity = control_frames.NodeCapacity("$share/g/a", 2, 1, 10, [(3, 5)], [(3, 4)], [1, 2])
    tell = control_frames.FullReport(7, [(3, 5)], [capacity])
    data = control_frames.encode_full_report(tell)
    yield _frame("GROUP", "tell", tell, data, control_frames.decode_full_report)
    data = control_frames.encode_report_ack(7, [(3, 5)])
    yield _frame("GROUP", "heard", (7, [(3, 5)]), data, control_frames.decode_report_ack)
    data = control_frames.encode_report_request([(3, 5)])
    yield _frame("GROUP", "ask", [(3, 5)], data, control_frames.decode_report_request)
    report = groups.AgentReport(
        3, 5, 7, "$share/g/a", 2, 1, 10, [(3, 5)], [(3, 6)], [1, 2], [(3, 6)], True
    )
    yield _frame("GROUP", "report", report, groups.encode_report(report), groups.decode_report)
    older = replace(report, denied=[], has_changed=False)
    yield _frame("GROUP", "older_report", older, groups.encode_report(older), groups.decode_report)
    message = Message(b"a", b"payload", 1, False, b"\x03\x00\x01x", 0, TIME_US, b"c")
    message.partition, message.offset = 3, 5
    assign = groups.Assign(3, 5, 7, "$share/g/a", [message])
    data = groups.encode_assign(assign)
    yield _frame(
        "GROUP", "assign", _assigned(assign), data, lambda d: _assigned(groups.decode_assign(d))
    )


def _assigned(assign: groups.Assign) -> object:
    names = ("topic", "payload", "qos", "properties", "timestamp_us", "partition", "offset")
    found = [[getattr(each, name) for name in names] for each in assign.messages]
    return assign.home, assign.epoch, assign.number, assign.key, found


def _raft() -> Iterator[Sample]:
    for name, message in {
        "vote_request": raft.VoteRequest(2, 9, 1, True, True),
        "vote_reply": raft.VoteReply(2, True, True),
        "append": raft.Append(2, 4, 1, 3, ENTRIES),
        "append_reply": raft.AppendReply(2, False, 4, 3, 1),
        "install": raft.Install(2, SNAPSHOT),
        "timeout_now": raft.TimeoutNow(2),
    }.items():
        data = encode_message("n1.a", "n2.b", message)
        # A snapshot is compressed, and the bytes depend on the library.
        yield _frame(
            "RAFT",
            name,
            ("n1.a", "n2.b", message),
            data,
            decode_message,
            is_exact=name != "install",
        )


def _metadata() -> Iterator[Sample]:
    node = model.NodeInfo("n1", "i1", "h:7", "h:1", "h:9", "data", "up", 3)
    info = model.PartitionInfo(("n1", "n2"), ("n3",), "n1", 4, ("n1",), 5)
    for name, command in {
        "init": commands.InitCluster("c1", 2, 3, 2, node),
        "put": commands.PutNode(node, 2),
        "remove": commands.RemoveNode("n1", 3),
        "change": commands.ChangePartitions(((0, 4, info),), ((3, node),), True),
        "give_up": commands.GiveUpRecords(((0, 4, info),), 9),
        "users": commands.PutUsers(3, b"users"),
        "access": commands.PutAccess(3, b"access"),
        "generation": commands.PutGeneration(7, 9, (9, 1 << 52)),
        "resize": commands.Resize(3, False, 3, 2),
        "replication": commands.SetReplication((2, 1), (3, 2)),
        "placement": commands.PutPlacement(3, (model.NodeTraits("n1", "a", 200),), True),
    }.items():
        data = encode_request("n1.x.1", metadata.encode_command(command))
        yield _frame("PROPOSAL", name, ("n1.x.1", command), data, _proposal)
    yield _frame("PROPOSAL_RESULT", "one", "n1.x.1", b"n1.x.1", lambda d: d.decode("ascii"))
    whole = model.ClusterMetadata("c1", 3, 2, {"n1": node}, (info,), 9, ("n1",), (("n2", "i2"),))
    data = metadata.encode_metadata(whole)
    yield Sample("records", "metadata", whole, data, metadata.decode_metadata)
    whole = replace_struct(whole, generation=model.AgreedGeneration(9, (9, 1 << 52)))
    data = metadata.encode_metadata(whole)
    yield Sample("records", "metadata.generation", whole, data, metadata.decode_metadata)
    whole = replace_struct(whole, replication=model.AgreedReplication(9, False, 3, 2))
    data = metadata.encode_metadata(whole)
    yield Sample("records", "metadata.replication", whole, data, metadata.decode_metadata)
    traits = (model.NodeTraits("n1", "a", 200),)
    whole = replace_struct(whole, placement=model.AgreedPlacement(9, traits, True))
    data = metadata.encode_metadata(whole)
    yield Sample("records", "metadata.placement", whole, data, metadata.decode_metadata)


def _proposal(data: bytes) -> object:
    request, command = decode_request(data)
    return request, metadata.decode_command(command)


def _members() -> Iterator[Sample]:
    news = federation.Announcement(A, 1, 2, 0, [B], "h:1", False, ["a/+", "b/#"], [])
    change = federation.Announcement(A, 1, 3, 2, [B], "h:1", True, ["c"], ["b/#"])
    retained = federation.RetainedMessage("a", b"x", 1, b"\x03\x00\x01x", TIME_US, (5, A, 1, 7))
    data = federation.Data(
        A, 1, 7, 1, 4, 1, True, "a/b", b"x", b"\x01\x00", 2.5, [(B, 3, 1), (C, 9, 9)], 1, 5,
        [(B, True, ["$share/g/a/b"])], True,
    )  # fmt: skip
    for frame in (
        federation.Hello(3, b"12345678", True),
        federation.Announcements([news, change]),
        federation.AnnouncementRequest([(A, 1, 5), (B, 2, 1)]),
        data,
        federation.StreamAck(A, 1, B, 12, 3),
        federation.RetainedRequest(A, B, 1, 4, "a/#", 3, "a", "b", [("a", (5, A, 1, 7))]),
        federation.Retained(A, B, 1, 4, [retained], "a"),
        federation.Goodbye("leaving"),
        federation.RetainedDigest(A, B, 1, [(3, 99)]),
        federation.Skip(A, 1, 7, 1, 4, [(B, 3, 1)], 1),
        federation.Vouchers([federation.Voucher(A, 1, 2, 3.5, b"pem", b"signature")]),
        federation.Memory(1.5, [(A, 1, 2)]),
        federation.Clock(1.5),
    ):
        name = f"FRAME.{type(frame).__name__}"
        yield Sample(FEDERATION, name, frame, federation.encode(frame), federation.decode)
    names = [site_names.SiteName(A, 1, "plant-1")]
    decode = msgspec.msgpack.Decoder(list[site_names.SiteName]).decode
    yield Sample(FEDERATION, "NAMES.one", names, msgspec.msgpack.encode(names), decode)
    for kind in ("PING", "PONG"):
        yield Sample(FEDERATION, f"{kind}.one", (1.5,), links.TOKEN.pack(1.5), links.TOKEN.unpack)


def cluster_kinds() -> set[str]:
    """The names of the frames between nodes."""
    return {
        name for name, value in vars(kinds).items() if name.isupper() and isinstance(value, int)
    }
