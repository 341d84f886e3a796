"""Status of a federator, for people and programs."""

from typing import Final

from holdfast.config.federation import Federation
from holdfast.federation.core.member import FederationMember
from holdfast.federation.core.retained.clock import HybridClock
from holdfast.federation.sidecar.counters import Counters
from holdfast.federation.sidecar.deliveries import Deliveries
from holdfast.federation.sidecar.links import MemberLinks
from holdfast.federation.sidecar.manager_client.client import ManagerClient
from holdfast.federation.sidecar.publications import Publications
from holdfast.federation.sidecar.store.store import MemberStore
from holdfast.io.peers.link import PeerLink

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
