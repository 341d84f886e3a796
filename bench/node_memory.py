"""The memory of any node of a large cluster: what it has of all sessions and of all other nodes.

    python -m bench.node_memory [--nodes 30] [--sessions 1000000] [--filters 1000000]

Every node has the replicated state of all sessions, and the filters of all other nodes. This
process builds both as a node does: it applies the records of sessions with one subscription each,
and the announcements of the other nodes, each with its even share of the filters. The memory is
what the process has more afterwards. One topic is then matched with all filters. The metadata is
that of `bench.metadata`, with 64 and 1,024 partitions. Interpreted Python unless `make compile` was
run.
"""

import os
import sys
import time

from bench.metadata import placed_cluster
from bench.options import new_parser, write_json
from bench.process import rss_bytes
from holdfast.io.event_loop.loop import spare_the_collector
from holdfast.log.journal.journal import Journal
from holdfast.log.record import SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.metadata.codec import encode_metadata
from holdfast.node.node import Node
from holdfast.node.routing.interest_frames import Interest
from holdfast.node.routing.peer_filters import PeerFilters
from holdfast.node.routing.qos0_routing import ANNOUNCED_MAX
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    OpenRecord,
    SubscribeRecord,
    encode_session,
    open_record,
)

PARTITIONS = (64, 1024)


class NodeModel:
    """The replicated state and the peers' filters of one node."""

    def __init__(self, nodes: int) -> None:
        config = NodeConfig(partitions=PARTITIONS[0])
        self.names = [f"n{number + 1}" for number in range(nodes)]
        self.node = Node(config, Journal(config.partitions, replicated=True))
        self.replicated = ReplicatedState(RecordedState(config, self.node.state.journal))
        self.filters = PeerFilters(self.node.state, lambda node, number: None, lambda changed: None)

    def record_sessions(self, count: int) -> None:
        """Applies the records of `count` sessions, an even part of them at each node."""
        start = [0] * PARTITIONS[0]
        for number in range(count):
            session = Session(f"client-{number}")
            session.epoch = 1
            session.expiry_s = 3600
            owner = self.names[number % len(self.names)]
            subscription = (filter_of(number), 1, False, False, 0, 0)
            self._apply(session, open_record(session, False, owner))
            self._apply(session, SubscribeRecord(session.client_id, [subscription], start))

    def _apply(self, session: Session, record: OpenRecord | SubscribeRecord) -> None:
        home = self.replicated.home(session.client_id)
        payload = encode_session(record)
        applied = Record(home, SESSION, client_id=session.key, sequence=1, payload=payload)
        self.replicated.apply(applied)

    def announce_filters(self, count: int) -> None:
        """Takes the filters of the other nodes."""
        others = self.names[1:]
        for number, name in enumerate(others):
            filters = [filter_of(each) for each in range(number, count, len(others))]
            for at in range(0, len(filters), ANNOUNCED_MAX):
                added = filters[at : at + ANNOUNCED_MAX]
                self.filters.change(name, Interest(1, at == 0, added, []))
                while self.filters.has_more:
                    self.filters.step(self.node.state, len(added))


def filter_of(number: int) -> str:
    return f"site/{number % 1000}/device/{number}/state"


def measure(nodes: int, sessions: int, filters: int) -> dict[str, float]:
    spare_the_collector()
    pid = os.getpid()
    model = NodeModel(nodes)
    base = rss_bytes(pid)
    began_s = time.process_time()
    model.record_sessions(sessions)
    with_sessions, sessions_s = rss_bytes(pid), time.process_time()
    model.announce_filters(filters)
    with_filters, filters_s = rss_bytes(pid), time.process_time()
    topics = [filter_of(number) for number in range(0, filters, max(1, filters // 10_000))]
    for topic in topics:
        assert len(model.filters.plain.match(topic)) == 1
    figures = {
        "bytes_per_session": (with_sessions - base) / sessions,
        "us_per_session": (sessions_s - began_s) / sessions * 1e6,
        "bytes_per_filter": (with_filters - with_sessions) / filters,
        "us_per_filter": (filters_s - sessions_s) / filters * 1e6,
        "us_per_match": (time.process_time() - filters_s) / len(topics) * 1e6,
        "node_mb": with_filters / 1e6,
    }
    for partitions in PARTITIONS:
        metadata = placed_cluster(nodes, partitions).metadata
        figures[f"metadata_kb_{partitions}_partitions"] = len(encode_metadata(metadata)) / 1e3
    return {name: round(value, 2) for name, value in figures.items()}


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.node_memory", __doc__)
    parser.add_argument("--nodes", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--filters", type=int, default=1_000_000)
    arguments = parser.parse_args(argv)
    figures = measure(arguments.nodes, arguments.sessions, arguments.filters)
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):32} {value:>12,}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
