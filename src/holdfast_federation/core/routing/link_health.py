"""Finds which peers respond, and which links are stable enough to announce.

A link is down when its connection closes, or when the peer does not reply to several probes. A
HELLO every `hello_s` keeps an idle link cheap. When one is late, the member sends a HELLO that
wants a reply before it concludes anything. It does so earlier on a link on which it has sent
messages and received nothing, because confirmations normally follow.
"""

from dataclasses import dataclass

from holdfast_federation.core.config import FederationConfig


@dataclass(slots=True)
class LinkHealth:
    """The times and probes of one link, in seconds of the monotonic clock."""

    received_at: float
    hello_at: float
    usable_at: float
    """The time from which the link is announced."""
    burdened_at: float | None = None
    """The time of the first message since the peer was last heard."""
    probes: int = 0
    """The probes without a reply so far."""
    probed_at: float = 0.0
    slow_until: float = 0.0
    """Until then the early probe is left out, because the last one found a peer that is only slow.
    """
    is_busy: bool = False


@dataclass(slots=True)
class _Losses:
    """The recent losses of a link, by which a flapping link is announced later and later."""

    count: int
    last_at: float


@dataclass(frozen=True, slots=True)
class Due:
    """The actions that are due: HELLOs, HELLOs that want a reply, and links that are down."""

    hellos: list[bytes]
    probes: list[bytes]
    down: list[bytes]


class LinkTable:
    """The links of this member by peer."""

    def __init__(self, config: FederationConfig) -> None:
        self._config = config
        self._links: dict[bytes, LinkHealth] = {}
        self._losses: dict[bytes, _Losses] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._links

    def __getitem__(self, peer: bytes) -> LinkHealth:
        return self._links[peer]

    def peers(self) -> list[bytes]:
        return list(self._links)

    def up(self, peer: bytes, now: float) -> None:
        """Notes a link that is up. Each loss of a flapping one doubles its wait."""
        losses = self._losses.get(peer)
        usable_at = now
        if losses is not None and now - losses.last_at < self._config.flap_s:
            over = losses.count - self._config.flaps_free
            if over > 0:
                # Bounded before it is raised: a link may flap thousands of times.
                usable_at += min(2.0 ** min(over - 1, 16), self._config.link_delay_max_s)
            usable_at = max(usable_at, losses.last_at + self._config.relink_s)
        else:
            self._losses.pop(peer, None)
        self._links[peer] = LinkHealth(now, now, usable_at)

    def down(self, peer: bytes, now: float) -> bool:
        """Notes a link that is down. Returns False if it was down already."""
        if self._links.pop(peer, None) is None:
            return False
        losses = self._losses.get(peer)
        if losses is None or now - losses.last_at >= self._config.flap_s:
            self._forget(now)
            losses = _Losses(0, now)
            self._losses[peer] = losses
        losses.count += 1
        losses.last_at = now
        return True

    def note_received(self, peer: bytes, now: float) -> None:
        """Notes a frame of the peer."""
        link = self._links[peer]
        if link.probes > 1:
            link.slow_until = now + self._config.slow_s
        link.received_at = now
        link.burdened_at = None
        link.probes = 0

    def burdened(self, peer: bytes, now: float) -> None:
        """Notes a message that was sent to the peer."""
        link = self._links[peer]
        if link.burdened_at is None:
            link.burdened_at = now

    def note_hello(self, peer: bytes, now: float) -> None:
        """Notes a HELLO that was sent because the peer requested it."""
        self._links[peer].hello_at = now + self._config.hello_s

    def usable(self, now: float) -> list[bytes]:
        """Returns the peers whose links may be announced, in order of ids."""
        return sorted(peer for peer, link in self._links.items() if link.usable_at <= now)

    def due(self, now: float) -> Due:
        """Returns what is due, and counts it as done."""
        config = self._config
        due = Due([], [], [])
        for peer, link in self._links.items():
            if now >= self._probe_at(link):
                if link.probes == config.probes_max:
                    due.down.append(peer)
                    continue
                link.probes += 1
                link.probed_at = now
                link.hello_at = now + config.hello_s
                due.probes.append(peer)
            elif now >= link.hello_at:
                link.hello_at = now + config.hello_s
                due.hellos.append(peer)
        return due

    def timer(self, now: float) -> float:
        times = [float("inf")]
        for link in self._links.values():
            times.append(min(link.hello_at, self._probe_at(link)))
            if link.usable_at > now:
                times.append(link.usable_at)
        return min(times)

    def _probe_at(self, link: LinkHealth) -> float:
        config = self._config
        if link.probes:
            # The interval begins with the probe and not when it was due. A member whose own event
            # loop stood still has not read the replies, either.
            return link.probed_at + config.probe_interval_s
        at = link.received_at + config.probe_after_s
        burdened_at = link.burdened_at
        if burdened_at is None or burdened_at < link.slow_until:
            return at
        return min(at, burdened_at + config.busy_probe_after_s)

    def _forget(self, now: float) -> None:
        for peer, losses in list(self._losses.items()):
            if now - losses.last_at >= self._config.flap_s:
                del self._losses[peer]
