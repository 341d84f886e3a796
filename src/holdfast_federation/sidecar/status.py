"""Status of a federator, for people and programs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from holdfast.config.federation import Federation
from holdfast.io.peers.complaints import Complaints
from holdfast.io.peers.link import PeerLink
from holdfast_federation.core.effects import Dropped
from holdfast_federation.core.frames import KINDS, Data
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.retained.clock import HybridClock
from holdfast_federation.sidecar.deliveries import Deliveries
from holdfast_federation.sidecar.links import MemberLinks
from holdfast_federation.sidecar.manager_client.client import ManagerClient
from holdfast_federation.sidecar.publications import Publications
from holdfast_federation.sidecar.store.store import MemberStore

CONTROL: Final = frozenset((1, 2, 3, 6, 8, 9, 11, 13))
"""The kinds of frames that carry no message."""
_DATA: Final = next(number for number, kind in KINDS.items() if kind is Data)
LOSSES: Final = ("queue full", "too old", "member left", "member gone")
"""Reasons of loss that are logged, at most once a minute for each destination."""


@dataclass(slots=True)
class Counters:
    """The counts of frames, deliveries and losses of one federator."""

    delivered: int = 0
    """Messages delivered to the edge, without repetitions."""
    control_frames: int = 0
    control_bytes: int = 0
    data_frames: int = 0
    """Frames with messages and their confirmations."""
    data_bytes: int = 0
    data_copies: int = 0
    """The part of `data_frames` with messages: one frame for each link."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Lost messages of QoS 0, or lost destinations of other messages, by reason."""
    hops: Counter[int] = field(default_factory=Counter)
    """Messages delivered here, by the number of links that they crossed."""

    def sent(self, frame: bytes) -> None:
        """Counts a frame that was sent."""
        if frame[1] in CONTROL:
            self.control_frames += 1
            self.control_bytes += len(frame)
        else:
            self.data_frames += 1
            self.data_bytes += len(frame)
            self.data_copies += frame[1] == _DATA

    def count_lost(self, effect: Dropped, complaints: Complaints) -> None:
        """Counts a lost message, and logs the reasons that an operator should know."""
        self.dropped[effect.reason] += 1
        if effect.reason in LOSSES:
            destination = effect.destination.hex() if effect.destination else "nobody"
            count = self.dropped[effect.reason]
            text = f"messages for {destination} are lost: {effect.reason}, {count} so far"
            complaints.say(f"{effect.reason} {destination}", effect.reason, text)


QUEUES_MAX: Final = 256
"""The most destinations in a status, those with the longest queues first."""


def clock_problem(clock: HybridClock) -> str:
    """Describes the problem of the clock. Empty: there is none."""
    if clock.is_wrong and clock.ahead_s is None:
        return "the clock was never set: set it, as with NTP"
    if clock.is_wrong:
        return (
            f"the clock is {_skew(clock.ahead_s)} of the other members': set it, as with NTP;"
            " retained messages are stamped with their time until then"
        )
    if clock.is_disputed:
        return (
            f"the clock is {_skew(clock.ahead_s)} of a linked member's: one of the two is wrong,"
            " and what is retained may differ until it is set"
        )
    return ""


def _skew(ahead_s: float | None) -> str:
    assert ahead_s is not None
    return f"{abs(ahead_s) / 86_400:.1f} days {'ahead' if ahead_s > 0 else 'behind'}"


def problems_of(member: FederationMember) -> list[str]:
    problems = [clock_problem(member.retained.clock)] if member.retained.is_on else []
    forged = member.counts["forged announcement"]
    if forged:
        problems.append(f"{forged} announcements had a false signature")
    return [problem for problem in problems if problem]


def link_name(link: PeerLink) -> str:
    """The name that the member at the other end has given itself, or ""."""
    return "" if link.peer is None else link.peer.site


def _link_fields(node: bytes, link: PeerLink, now: float) -> dict[str, object]:
    return {
        "id": node.hex(),
        "remote": link.remote,
        "dialled": link.dials,
        "up_s": round(now - link.established_at, 3),
        "rtt_ms": None if link.rtt_s is None else round(1e3 * link.rtt_s, 3),
        "busy": link.is_busy,
        "unsent_bytes": link.pending_bytes(),
    }


def status_of(
    settings: Federation,
    epoch: int,
    member: FederationMember,
    links: MemberLinks,
    store: MemberStore,
    publications: Publications,
    deliveries: Deliveries,
    counters: Counters,
    client: ManagerClient | None,
    now: float,
) -> dict[str, object]:
    entries = member.database.entries
    queued = {
        node.hex(): member.custody.queued(node)
        for node in entries
        if node != member.node and member.custody.queued(node)
    }
    longest = sorted(queued.items(), key=lambda item: (-item[1], item[0]))
    return {
        "federation": settings.name,
        "id": member.node.hex(),
        "epoch": epoch,
        "address": links.identity.peer_address,
        "listening": links.address,
        "broker_connected": deliveries.is_up,
        "members": len(entries),
        "digest": member.database.digest.hex(),
        "site": settings.site,
        "names": links.names.by_id(),
        "links": [
            _link_fields(node, link, now)
            | {
                "name": links.names.name_of(node) or link_name(link),
                "usable": node in member.links and member.links[node].usable_at <= now,
            }
            for node, link in sorted(links.linked().items())
        ],
        "interest": {
            "local": len(entries[member.node].filters),
            "remote": len(member.remote_filters()),
        },
        "custody": {
            "messages": len(member.custody),
            "bytes": member.custody.bytes,
            "queued": dict(longest[:QUEUES_MAX]),
            "unconfirmed": store.waiting(),
            "held": publications.waiting_count,
            "disk_full": store.is_full,
        },
        "delivering": len(deliveries),
        "problems": problems_of(member),
        "clock": {
            "ahead_s": member.retained.clock.ahead_s,
            "wrong": member.retained.is_on and member.retained.clock.is_wrong,
            "disputed": member.retained.is_on and member.retained.clock.is_disputed,
        },
        "manager": None
        if client is None
        else {"connected": client.is_connected, "id": client.id, "url": settings.manager},
        "counters": {
            "published": publications.published,
            "unwanted": publications.unwanted,
            "delivered": counters.delivered,
            "control_frames": counters.control_frames,
            "control_bytes": counters.control_bytes,
            "data_frames": counters.data_frames,
            "data_bytes": counters.data_bytes,
            "data_copies": counters.data_copies,
            "dropped": dict(counters.dropped + member.counts),
            "hops": {str(hops): count for hops, count in sorted(counters.hops.items())},
            "links_up": links.metrics.connects,
            "links_down": links.metrics.disconnects,
            "dials": links.metrics.dials,
            "refused": dict(links.metrics.refused),
            "frames_unsent": dict(links.dropped),
        },
    }
