"""The links of a member: who is alive, and which links are steady enough to be announced.

A link is down when its connection closes, or when the peer stays silent although it was asked: a
HELLO every `hello_s` keeps an idle link quiet and cheap, and a late one is asked for before
anything is concluded from it. A link on which messages go out is asked sooner, unless something
comes back, as confirmations mostly do.
"""

from dataclasses import dataclass

from holdfast.federation.core.config import FederationConfig


@dataclass(slots=True)
class LinkHealth:
    received_at: float
    hello_at: float
    usable_at: float
    burdened_at: float | None = None
    """When a message went out, the first since the peer was heard."""
    probes: int = 0
    probed_at: float = 0.0
    slow_until: float = 0.0
    is_busy: bool = False


@dataclass(slots=True)
class _Losses:
    count: int
    last_at: float


@dataclass(frozen=True, slots=True)
class Due:
    """What the time asks for: HELLOs, HELLOs that want an answer, links that are down."""

    hellos: list[bytes]
    probes: list[bytes]
    down: list[bytes]


class LinkTable:
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
        """False: it was down."""
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
        link = self._links[peer]
        if link.probes > 1:
            link.slow_until = now + self._config.slow_s
        link.received_at = now
        link.burdened_at = None
        link.probes = 0

    def burdened(self, peer: bytes, now: float) -> None:
        """A message went out."""
        link = self._links[peer]
        if link.burdened_at is None:
            link.burdened_at = now

    def note_hello(self, peer: bytes, now: float) -> None:
        """It asked, and got its HELLO."""
        self._links[peer].hello_at = now + self._config.hello_s

    def usable(self, now: float) -> list[bytes]:
        """In order of ids."""
        return sorted(peer for peer, link in self._links.items() if link.usable_at <= now)

    def due(self, now: float) -> Due:
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
            # Not by when it was due: whose own loop stood still has not listened, either.
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
