"""Decoders of bytes and texts that others made: whatever comes, only the error that a decoder
declares comes out of it. Another one would end the connection's task, or the node.

A function `decode…` or `parse…` that takes bytes or a text is in DECODERS, or in ELSEWHERE with the
test that does the same.
"""

import ast
import base64
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.api.log_plan import BadRead
from holdfast.api.log_plan import decode_request as decode_read
from holdfast.api.views.pages import decode_place
from holdfast.api.views.records import BadCursor, decode_positions
from holdfast.client.identity import parse_identity
from holdfast.client.log.errors import LogOptionError
from holdfast.client.log.position import Position
from holdfast.client.log.reading.offsets import OffsetError, parse_generation, parse_position
from holdfast.client.pubqueue.format import parse_paper
from holdfast.client.servers import Server, parse_references, parse_server
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.json_object import decode_object
from holdfast.log.journal.watermarks import decode_checkpoint
from holdfast.log.reading.index_file import CorruptIndex, decode, decode_head
from holdfast.log.record import MESSAGE, Record
from holdfast.node.delivery.replay_start import InvalidStart, parse_start
from holdfast.node.failure.detector import decode_heartbeat
from holdfast.node.feeds import frames as feeds
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.groups.codec import AgentReport, decode_assign, decode_report
from holdfast.node.groups.codec import encode_report as encode_agent_report
from holdfast.node.groups.control_frames import (
    decode_full_report,
    decode_report_ack,
    decode_report_request,
)
from holdfast.node.metadata.codec import decode_command, decode_metadata
from holdfast.node.metadata.state_machine import MetaState, decode_request
from holdfast.node.publish.forward_frames import decode_forward, decode_result
from holdfast.node.publish.producers import decode_producer
from holdfast.node.raft.codec import (
    decode_entries,
    decode_message,
    decode_snapshot,
    encode_entries,
    encode_message,
    encode_snapshot,
)
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftSnapshot
from holdfast.node.raft.messages import Append, AppendReply, Install, VoteRequest
from holdfast.node.reads.fetch_frames import (
    FetchedFrame,
    FetchFrame,
    ReadRange,
    StartEntry,
    decode_fetch,
    decode_fetched,
    encode_fetch,
    encode_fetched,
)
from holdfast.node.reads.read_barrier import decode_barrier
from holdfast.node.replicate import codec as partitions
from holdfast.node.replicate.disk_position import DiskPosition, decode_position, encode_report
from holdfast.node.replicate.disk_position import decode_report as decode_disk_report
from holdfast.node.runtime.relayed_links import decode_relayed, encode_relayed
from holdfast.node.session.audience import decode_audience
from holdfast.node.session.state import decode_cursor, encode_cursor
from holdfast.node.state.ban_records import decode_ban
from holdfast.node.state.session_records import decode_entry, decode_group, decode_record
from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast.security.access.access_file import AccessError
from holdfast.security.access.access_file import parse as parse_access
from holdfast.security.acl import AclError, AclFile
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.document import parse as parse_document
from holdfast.security.identity.http_check import parse_reply
from holdfast.security.identity.identity import LoginRequest
from holdfast.security.identity.keys import KeysError, parse_keys
from holdfast.security.identity.topic_check import parse_verdict
from holdfast.security.passwords import PasswordError, PasswordFile, parse_hash
from holdfast.security.peer_identity import Refusal
from holdfast.security.peer_identity import decode_identity as decode_peer_identity
from holdfast.security.psk import parse_keys as parse_psk
from holdfast.security.scram_file import ScramError, ScramFile, parse_credentials
from holdfast.security.tls import TlsError
from holdfast_federation.core.identity import BadIdentity, Identity, decode_identity
from holdfast_federation.sidecar.edge_broker.origin_offset import decode_starts
from tests.fuzz.mutation import damage, noise
from tests.support.source_tree import modules, statements

ROUNDS = 1_500
NESTED = (b"[" * 100_000, b'{"a":' * 100_000)
PEER_IDENTITY = (
    b'{"node_id":"n1","incarnation":"i","cluster_id":"c","wire_version":1,"role":"data",'
    b'"peer_address":"h:1","client_address":"","admin_address":"","process":"p","features":"",'
    b'"disk":"","site":""}'
)
JSON = (
    b'{"op":"open","client":"c","epoch":1,"expiry_s":3,"clean":true,"username":null}',
    b'{"key":"g","positions":[1,2],"done":[[0,[3]]],"given":[[1,4]],"epoch":2}',
    b'{"id":1,"msg":"m","sender":"s"}',
    b'{"homes":[[1,2]],"number":1,"groups":[]}',
    b'{"format":1,"keys":[{"kty":"oct","k":"AAAA"}],"users":{}}',
    b'[["a/1"],["b/2"]]',
    b'{"kind":"remove","node":"n1","version":3}',
)
DYNAMIC_SECURITY = json.dumps({
    "defaultACLAccess": {"publishClientSend": True},
    "clients": [{"username": "u", "roles": [{"rolename": "r", "priority": 1}]}],
    "groups": [{"groupname": "g", "roles": [], "clients": [{"username": "u"}]}],
    "roles": [{"rolename": "r", "acls": [
        {"acltype": "subscribePattern", "topic": "a/#", "priority": 0, "allow": True}]}],
}).encode()  # fmt: skip
VALUES: tuple[object, ...] = (
    None, True, -1, 1.5, 1 << 70, "\ud800", [], [[]], {}, [None], ["x", 1], {"a": []}, 1e308,
)  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "surrogateescape"))


def batch() -> bytes:
    builder = BatchBuilder(0, 5)
    builder.add(Record(0, MESSAGE, topic=b"a/b", client_id=b"c", payload=b"payload"))
    return builder.build(0)


def table() -> dict[str, Decoder]:
    entry = LogEntry(1, 1, EntryKind.MEMBERS, Membership(("a/1", "b/2")).encode())
    snapshot = RaftSnapshot(3, 2, Membership(("a/1",)), b"state")
    raft = tuple(
        encode_message("a/1", "b/2", message)
        for message in (
            VoteRequest(2, 5, 1),
            Append(2, 1, 1, 1, (entry,)),
            AppendReply(2, True, 5),
            Install(2, snapshot),
        )
    )
    report = encode_agent_report(
        AgentReport(1, 2, 3, "$share/g/a", 1, True, 10, [(0, 1)], [(1, 2)], [1, 2], [], False)
    )
    numbers = tuple(struct.pack(f"<{count}Q", *range(count)) for count in (1, 3, 6))
    of_batch = (batch(), struct.pack(">IQI", 0, 1, len(batch())) + batch(), *numbers)
    bad_frame = (BadFrame,)
    origin = Server("mqtt", "h", 1883, "")
    found: dict[str, Decoder] = {}

    def add(
        name: str,
        run: Callable[[bytes], object],
        errors: tuple[type[Exception], ...],
        samples: tuple[bytes, ...],
    ) -> None:
        found[name] = Decoder(run, errors, samples)

    invalid = (ValueError,)
    packed = (struct.error, ValueError)
    add(
        "node/delivery/replay_start.py:parse_start",
        of_text(lambda text: parse_start(text, 10**15)),
        (InvalidStart,),
        (b"earliest", b"time:2026-01-01T00:00:00Z", b"ago:1h", b"offset:3", b"last:5"),
    )
    add(
        "node/publish/producers.py:decode_producer",
        decode_producer,
        packed,
        (struct.pack("<BHHHIQq", 1, 1, 1, 0, 1, 2, 3) + b"pu",),
    )
    add("node/state/session_records.py:decode_record", decode_record, invalid, JSON)
    add("node/state/session_records.py:decode_entry", decode_entry, invalid, JSON)
    add(
        "node/state/session_records.py:decode_group",
        lambda data: decode_group(data, 2),
        invalid,
        JSON,
    )
    add("node/session/audience.py:decode_audience", decode_audience, invalid, (b"\1g/a",))
    add(
        "node/session/state.py:decode_cursor",
        lambda data: decode_cursor(data, 4),
        packed,
        (encode_cursor([(0, 5), (3, 9)], {7: None}, [(1, 2)]),),
    )
    add("client/identity.py:parse_identity", of_text(parse_identity), invalid, (b"p:1:2",))
    add("client/pubqueue/format.py:parse_paper", parse_paper, invalid, JSON)
    add(
        "client/servers.py:parse_server",
        of_text(parse_server),
        invalid,
        (b"mqtts://h:8883", b"[::1]:1883", b"ws://h/mqtt"),
    )
    add(
        "client/servers.py:parse_references",
        of_text(lambda text: parse_references(text, origin)),
        (),
        (b"mqtt://a:1 [::1]:2 h",),
    )
    add(
        "node/failure/detector.py:decode_heartbeat",
        decode_heartbeat,
        bad_frame,
        (*JSON, *numbers),
    )
    asked = FetchFrame(number=1, ranges=[ReadRange(0, 1, 2)], filters=[("a/+", 0)], starts=[[1]])
    searched = FetchFrame(number=1, ranges=[ReadRange(0, 0, 2)], queries=[("#", 0, 1, [])])
    add(
        "node/reads/fetch_frames.py:decode_fetch",
        lambda data: decode_fetch(data, 4),
        bad_frame,
        (encode_fetch(asked), encode_fetch(searched)),
    )
    record = Record(0, MESSAGE, topic=b"a/b", client_id=b"c", payload=b"payload", offset=4)
    fetched = FetchedFrame(number=1, refused=[(0, 3, 9)], positions=[5])
    found_start = FetchedFrame(number=1, starts=[StartEntry([5], [("a/b", 4)], "", 9)])
    add(
        "node/reads/fetch_frames.py:decode_fetched",
        decode_fetched,
        bad_frame,
        (*encode_fetched(fetched, [record]), *encode_fetched(found_start, [])),
    )
    add("node/metadata/codec.py:decode_command", decode_command, bad_frame, JSON)
    add("node/metadata/codec.py:decode_metadata", decode_metadata, bad_frame, JSON)
    add(
        "node/metadata/state_machine.py:decode_request",
        decode_request,
        bad_frame,
        (b"\3n1/" + JSON[6], JSON[6]),
    )
    add("node/metadata/state_machine.py:decode", MetaState.decode, bad_frame, JSON)
    feed_from = feeds.encode_feed_from([feeds.FeedFrom(0, 1, 2, 3, [(4, b"c")])])
    add("node/feeds/frames.py:decode_feed_from", feeds.decode_feed_from, bad_frame, (feed_from,))
    records = feeds.records_part(1, 99, batch(), [])
    feed = records + feeds.aligned_part(1, [(4, b"c")]) + feeds.offset_part(feeds.MARK, 1, 9)
    add("node/feeds/frames.py:decode_feed", feeds.decode_feed, bad_frame, (feed, records))
    ack = feeds.encode_feed_ack(7)
    add("node/feeds/frames.py:decode_feed_ack", feeds.decode_feed_ack, bad_frame, (ack,))
    add(
        "node/replicate/codec.py:decode_follow",
        partitions.decode_follow,
        bad_frame,
        (b"\2ab" + numbers[1], *numbers),
    )
    add(
        "node/replicate/codec.py:decode_follow_from",
        partitions.decode_follow_from,
        bad_frame,
        numbers,
    )
    add("node/replicate/codec.py:decode_ack", partitions.decode_ack, bad_frame, numbers)
    add(
        "node/replicate/codec.py:decode_offsets",
        lambda data: partitions.decode_offsets("COMMIT", data),
        bad_frame,
        numbers,
    )
    add(
        "node/replicate/codec.py:decode_replicate",
        partitions.decode_replicate,
        bad_frame,
        of_batch,
    )
    add(
        "node/replicate/disk_position.py:decode_position",
        of_text(decode_position),
        (),
        (b"1.2.3", "1.٣.3".encode()),
    )
    add(
        "node/replicate/disk_position.py:decode_report",
        decode_disk_report,
        bad_frame,
        (encode_report(5, 6, DiskPosition(1, 2, 3)),),
    )
    add(
        "node/runtime/relayed_links.py:decode_relayed",
        decode_relayed,
        bad_frame,
        (encode_relayed(1, 5, "n1", b""), encode_relayed(0x84, 5, "n1", b"\x0a\0x")),
    )
    add("node/publish/forward_frames.py:decode_forward", decode_forward, bad_frame, of_batch)
    add("node/publish/forward_frames.py:decode_result", decode_result, bad_frame, numbers)
    add("node/raft/codec.py:decode_message", decode_message, bad_frame, raft)
    add(
        "node/raft/codec.py:decode_entries",
        lambda data: decode_entries(data, 0, 1),
        (BadFrame, struct.error),
        (encode_entries((entry, entry)),),
    )
    add(
        "node/raft/codec.py:decode_snapshot",
        decode_snapshot,
        bad_frame,
        (encode_snapshot(snapshot),),
    )
    add("node/raft/log.py:decode", Membership.decode, bad_frame, (entry.data, *JSON))
    add("node/reads/read_barrier.py:decode_barrier", decode_barrier, bad_frame, numbers)
    add("node/groups/codec.py:decode_report", decode_report, bad_frame, (report,))
    add(
        "node/groups/codec.py:decode_assign",
        decode_assign,
        bad_frame,
        (report, *of_batch),
    )
    control = tuple(b"\0" + each for each in JSON)
    for name, run in (
        ("decode_full_report", decode_full_report),
        ("decode_report_ack", decode_report_ack),
        ("decode_report_request", decode_report_request),
    ):
        add(f"node/groups/control_frames.py:{name}", run, bad_frame, control)
    add(
        "holdfast_federation/core/identity.py:decode_identity",
        decode_identity,
        (BadIdentity,),
        (Identity(bytes(16), 3).encode(),),
    )
    add(
        "holdfast_federation/sidecar/edge_broker/origin_offset.py:decode_starts",
        decode_starts,
        (ValueError,),
        (b"[[1,[0,5]],[7,[9,9]]]", *JSON),
    )
    add("protocol/topics/names.py:decode_topic", decode_topic, (InvalidTopic,), (b"a/b/c",))
    add(
        "security/access/access_file.py:parse",
        lambda data: parse_access(data, "f"),
        (AccessError,),
        JSON,
    )
    add(
        "security/acl.py:parse",
        of_text(lambda text: AclFile.parse(text, "f")),
        (AclError,),
        (b"user a\ntopic read a/#\npattern write %u/%c\n",),
    )
    add(
        "security/identity/keys.py:parse_keys",
        lambda data: parse_keys(data, "f"),
        (KeysError,),
        JSON,
    )
    login = LoginRequest("c", "u", b"", "", "127.0.0.1:1", "l")
    add(
        "security/identity/http_check.py:parse_reply",
        lambda data: parse_reply(data, 200, login, 1000.0),
        (ValueError,),
        (b'{"result": "allow", "username": "u", "lasts_s": 5, "publish": ["a/#"]}', *JSON),
    )
    add(
        "security/identity/topic_check.py:parse_verdict",
        lambda data: parse_verdict(data, 200),
        (ValueError,),
        (b'{"result": "allow"}', b'{"Ok": true, "Error": ""}', b"ok", *JSON),
    )
    hashed = (b"$7$101$" + base64.b64encode(bytes(12)) + b"$" + base64.b64encode(bytes(64)),)
    add("security/passwords.py:parse_hash", of_text(parse_hash), (PasswordError,), hashed)
    add(
        "security/passwords.py:parse",
        of_text(lambda text: PasswordFile.parse(text, "f")),
        (PasswordError,),
        (b"user:" + hashed[0] + b"\n",),
    )
    add(
        "security/psk.py:parse_keys",
        of_text(lambda text: parse_psk(text, "f")),
        (TlsError,),
        (b"dev-1:0a0b0c0d\n",),
    )
    scram = (b"SCRAM-SHA-256$4096:" + b"$".join((base64.b64encode(bytes(16)),) * 3),)
    add(
        "security/scram_file.py:parse_credentials", of_text(parse_credentials), (ScramError,), scram
    )
    add(
        "security/scram_file.py:parse",
        of_text(lambda text: ScramFile.parse(text, "f")),
        (ScramError,),
        (b"user:" + scram[0] + b"\n",),
    )
    add(
        "log/journal/watermarks.py:decode_checkpoint",
        lambda data: decode_checkpoint(data, 2),
        (),
        numbers,
    )
    add("log/reading/index_file.py:decode_head", decode_head, (CorruptIndex,), numbers)
    add("log/reading/index_file.py:decode", decode, (CorruptIndex,), numbers)
    add("api/log_plan.py:decode_request", decode_read, (BadRead,), JSON)
    pages = tuple(base64.urlsafe_b64encode(each) for each in (*JSON, *NESTED, b"[1,2]"))
    add("api/views/pages.py:decode_place", of_text(decode_place), (BadCursor,), pages)
    add(
        "api/views/records.py:decode_positions",
        of_text(lambda text: decode_positions(text, 2, 0)),
        (BadCursor,),
        pages,
    )
    add(
        "client/log/position.py:parse",
        of_text(Position.parse),
        (LogOptionError,),
        (b'{"0": 12, "1": 7}', b"earliest"),
    )
    add(
        "client/log/reading/offsets.py:parse_position",
        of_text(lambda text: parse_position("here", text)),
        (OffsetError,),
        (b'{"0": 12, "1": 7}', b"latest", b'{"0": 1e999}', b'{"generation": -1}'),
    )
    add(
        "client/log/reading/offsets.py:parse_generation",
        of_text(lambda text: parse_generation("here", text)),
        (OffsetError,),
        (b'{"0": 12, "generation": 7}', b"latest", b'{"generation": 1e999}'),
    )
    add(
        "security/dynamic/document.py:parse",
        lambda data: parse_document(data, "file"),
        (DynamicSecurityError,),
        (DYNAMIC_SECURITY, *JSON),
    )
    add("log/files/json_object.py:decode_object", decode_object, invalid, JSON)
    add(
        "node/state/ban_records.py:decode_ban",
        decode_ban,
        invalid,
        (b'{"scope":"client","name":"c","until_us":5,"reason":"","by":"o","since_us":1}', *JSON),
    )
    add(
        "security/peer_identity.py:decode_identity",
        lambda data: decode_peer_identity(data, 1),
        (Refusal,),
        (PEER_IDENTITY, *JSON),
    )
    return found


DECODERS = table()
ELSEWHERE = {
    "api/endpoints.py:parse": "unit/api/test_endpoints.py",
    "holdfast_federation/core/frames.py:decode": "unit/federation/core/test_frames.py",
    "protocol/mqtt/decode.py:decode": "unit/protocol/mqtt/test_decode.py",
    "protocol/mqtt/decode.py:decode_ack": "unit/protocol/mqtt/test_decode.py",
    "protocol/mqtt/decode.py:decode_connect": "unit/protocol/mqtt/test_decode.py",
    "protocol/mqtt/properties.py:decode_block": "unit/protocol/mqtt/test_decode.py",
    "protocol/mqtt/properties.py:decode_properties": "unit/protocol/mqtt/test_decode.py",
    "protocol/mqtt/publish.py:decode_publish": "unit/protocol/mqtt/test_decode.py",
    "log/batch_builder.py:parsed": "unit/log/test_record.py",
}


def hostile(rng: random.Random, samples: tuple[bytes, ...]) -> bytes:
    kind = rng.random()
    data = rng.choice(samples)
    if kind < 0.02:
        return rng.choice((b"", data[: rng.randrange(4)])) + rng.choice(NESTED)
    if kind < 0.1:
        return noise(rng)
    if kind < 0.5 and data[:1] == b"{":
        content = json.loads(data)
        for key in rng.sample(list(content), rng.randint(1, len(content))):
            content[key] = rng.choice(VALUES)
        return json.dumps(content).encode()
    return damage(rng, data, samples)


@pytest.mark.filterwarnings("ignore:Key size should be")
@pytest.mark.parametrize("name", DECODERS)
def test_only_the_declared_error_comes_out(name: str) -> None:
    decoder = DECODERS[name]
    rng = random.Random(name)
    for data in (*decoder.samples, *(hostile(rng, decoder.samples) for _ in range(ROUNDS))):
        try:
            decoder.run(data)
        except decoder.errors:
            continue


def test_each_decoder_is_tested() -> None:
    found = set()
    for package in ("api", "client", "holdfast_federation", "log", "node", "protocol", "security"):
        for name, path in modules(package):
            text = path.read_text()
            if "def decode" not in text and "def parse" not in text:
                continue
            for node in statements(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.name.startswith(("decode", "parse")):
                    given = [each for each in node.args.args if each.arg not in ("self", "cls")]
                    kind = given[0].annotation if given else None
                    if kind is not None and ast.unparse(kind) in ("bytes", "str"):
                        found.add(f"{name}:{node.name}")
    assert found == DECODERS.keys() | ELSEWHERE.keys()
    for test in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / test).exists(), test


def test_json_is_read_where_nesting_is_known() -> None:
    """Whoever calls `json.loads` names the error of a text that is nested too deeply. Files of a
    data directory are read by `decode_object`."""
    for package in (
        "api", "client", "holdfast_federation", "io", "log", "node", "process", "protocol",
        "security",
    ):  # fmt: skip
        for _, path in modules(package):
            text = path.read_text()
            assert text.count("json.loads(") <= text.count("RecursionError"), path
