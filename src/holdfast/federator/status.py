"""How a federator is, for people and interfaces."""

from typing import Final

from holdfast.federation.member import FederationMember
from holdfast.federator.counters import Counters
from holdfast.federator.deliveries import Deliveries
from holdfast.federator.links import Links
from holdfast.federator.manager_client import ManagerClient
from holdfast.federator.publications import Publications
from holdfast.federator.settings import Settings
from holdfast.federator.store import Store

QUEUES_MAX: Final = 256
"""Destinations that are shown, the longest queues first."""


def status_of(
    settings: Settings,
    epoch: int,
    member: FederationMember,
    links: Links,
    store: Store,
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
        "links": [
            {
                "id": node.hex(),
                "remote": link.inner.remote,
                "dialled": link.inner.dials,
                "up_s": round(now - link.inner.established_at, 3),
                "rtt_ms": None if link.rtt_s is None else round(1e3 * link.rtt_s, 3),
                "busy": link.is_busy,
                "unsent_bytes": link.inner.pending_bytes(),
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
            "held": publications.held,
            "disk_full": store.is_full,
        },
        "delivering": len(deliveries),
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
