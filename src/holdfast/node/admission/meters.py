"""Shares one bucket per limit and name among the connections of that name.

Invariants
- Two connections of one name share its buckets, so a client gains nothing by connecting twice.
- A bucket outlives its connections until it is full again, so a client gains nothing by connecting
  again. The smallest counter-example: send a burst, reconnect, send a burst.
- At most `IDLE_MAX` buckets are kept without a connection. Above that the longest unused
  is dropped.
"""

from hashlib import sha256
from typing import Final

from holdfast.node.admission.limits import (
    ADDRESS,
    CLIENT,
    LISTENER,
    SCOPES,
    USER,
    AdmissionLimits,
)
from holdfast.node.admission.token_bucket import EMPTY, TokenBucket
from holdfast.node.refusal import Rejection

IDLE_MAX: Final = 100_000
"""The most buckets that are remembered for names without a connection."""
NAME_MAX: Final = 200
"""The most characters of a name that the tables keep as it is."""
SWEPT: Final = 2
"""The number of unused buckets that are looked at for each one that becomes unused."""

WITHIN: Final = 0
OVER_RATE: Final = 1
OVER_QUOTA: Final = 2

_MESSAGES: Final = "messages"
_BYTES: Final = "bytes"
_CONNECTS: Final = "connects"
_QUOTA: Final = "quota"


class SharedBucket:
    """A bucket with the number of connections that use it."""

    def __init__(self, key: tuple[str, str, str], bucket: TokenBucket) -> None:
        self.key = key
        self.bucket = bucket
        self.users = 0


class Meter:
    """The buckets that one connection takes from."""

    def __init__(self) -> None:
        self.messages: list[TokenBucket] = []
        self.bytes: list[TokenBucket] = []
        self.quota: TokenBucket | None = None
        self.shared: list[SharedBucket] = []
        # Whether the present message is refused, and why; "": it is accepted.
        self.refusal: Rejection | None = None
        # The time until which the client's input waits, and whether a timer ends that.
        self.throttled_until = 0.0
        self.is_throttled = False
        # The table's list of what was charged since its last report; None: nobody shares it.
        self.charged: list[tuple[Meter, list[SharedBucket]]] | None = None
        self.is_charged = False

    def state(self, now: float) -> int:
        """Whether the next message is within all limits: WITHIN, OVER_RATE or OVER_QUOTA."""
        quota = self.quota
        if quota is not None and quota.is_empty(now):
            return OVER_QUOTA
        over = WITHIN
        for bucket in self.messages:
            if bucket.is_empty(now):
                over = OVER_RATE
        for bucket in self.bytes:
            if bucket.is_empty(now):
                over = OVER_RATE
        return over

    def charge(self, messages: int, size_bytes: int) -> bool:
        """Takes what an accepted packet costs, and returns whether a rate is used up now. `state`
        was called for the present time."""
        is_used_up = False
        for bucket in self.messages:
            bucket.take(messages)
            is_used_up = is_used_up or bucket.tokens <= EMPTY
        for bucket in self.bytes:
            bucket.take(size_bytes)
            is_used_up = is_used_up or bucket.tokens <= EMPTY
        if self.quota is not None:
            self.quota.take(size_bytes)
        if self.charged is not None and not self.is_charged:
            self.is_charged = True
            self.charged.append((self, self.shared))
        return is_used_up

    def wait_s(self) -> float:
        """The seconds until the next message is within the rates."""
        longest_s = 0.0
        for bucket in self.messages:
            longest_s = max(longest_s, bucket.wait_s())
        for bucket in self.bytes:
            longest_s = max(longest_s, bucket.wait_s())
        return longest_s


class MeterTable:
    """The buckets of all names."""

    def __init__(self, limits: AdmissionLimits, idle_max: int = IDLE_MAX) -> None:
        """`idle_max`: the most buckets that are kept without a connection."""
        self.limits = limits
        self._idle_max = idle_max
        self._in_use: dict[tuple[str, str, str], SharedBucket] = {}
        # Without a connection, the longest unused first.
        self._idle: dict[tuple[str, str, str], SharedBucket] = {}
        # The meters charged since the last report to the other processes, with their buckets, which
        # a meter that is released meanwhile has no more. None: there is no other process.
        self.charged: list[tuple[Meter, list[SharedBucket]]] | None = None

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._in_use) + len(self._idle)

    def replace(self, limits: AdmissionLimits) -> None:
        """Uses other limits for the meters made from now on. All allowances start full."""
        self.limits = limits
        self._in_use = {}
        self._idle = {}

    def meter(self, names: dict[str, str], now: float) -> Meter | None:
        """The meter of a connection. `names`: its name in each scope. None: nothing is limited."""
        limits = self.limits
        meter = Meter()
        for scope in SCOPES:
            name = names.get(scope, "")
            if not name:
                continue
            rates = limits.rates_of(scope, name)
            if rates.messages_per_s > 0:
                meter.messages.append(
                    self._use(meter, (scope, _MESSAGES, name), rates.messages_per_s, now)
                )
            if rates.bytes_per_s > 0:
                meter.bytes.append(self._use(meter, (scope, _BYTES, name), rates.bytes_per_s, now))
        # Anonymous clients of an address are one user: their client ids are free to choose.
        scope = USER if names.get(USER) else ADDRESS
        name = names.get(scope, "")
        if name and limits.bytes_per_user > 0:
            per_s = limits.bytes_per_user / limits.period_s
            meter.quota = self._use(meter, (scope, _QUOTA, name), per_s, now, limits.bytes_per_user)
        meter.charged = self.charged
        return meter if meter.shared else None

    def release(self, meter: Meter, now: float) -> None:
        """Forgets a connection. Its buckets are kept until they are full."""
        for shared in meter.shared:
            shared.users -= 1
            # After `replace` the key may belong to another bucket.
            if shared.users == 0 and self._in_use.get(shared.key) is shared:
                del self._in_use[shared.key]
                self._keep(shared, now)
        meter.shared = []

    def has_allowance(self, scope: str, name: str, now: float) -> bool:
        """Whether one more CONNECT of the name is within its rate."""
        shared = self._idle.get((scope, _CONNECTS, name))
        return shared is None or not shared.bucket.is_empty(now)

    def charge_connect(self, scope: str, name: str, now: float) -> None:
        """Charges a CONNECT to a name."""
        per_s = self.limits.rates_of(scope, name).connects_per_s
        if per_s <= 0 or not name:
            return
        key = (scope, _CONNECTS, name)
        shared = self._idle.pop(key, None)
        if shared is None:
            shared = SharedBucket(key, self._bucket(per_s, now, 0.0))
        shared.bucket.refill(now)
        shared.bucket.take(1.0)
        if self.charged is not None:
            self.charged.append((Meter(), [shared]))
        self._keep(shared, now)

    def take_charged(self) -> list[tuple[tuple[str, str, str], float]]:
        """Returns the amount that was taken from each bucket since the last call, by its key."""
        if self.charged is None:
            return []
        found = []
        for meter, buckets in self.charged:
            meter.is_charged = False
            for shared in buckets:
                if shared.bucket.taken:
                    found.append((shared.key, shared.bucket.taken))
                    shared.bucket.taken = 0.0
        self.charged.clear()
        return found

    def debit(self, key: tuple[str, str, str], amount: float, now: float) -> None:
        """Takes from a bucket what another process has reported."""
        shared = self._in_use.get(key) or self._idle.pop(key, None)
        if shared is None:
            scope, kind, name = key
            rates, limits = self.limits.rates_of(scope, name), self.limits
            per_s, burst = 0.0, 0.0
            if kind == _MESSAGES:
                per_s = rates.messages_per_s
            elif kind == _BYTES:
                per_s = rates.bytes_per_s
            elif kind == _CONNECTS:
                per_s = rates.connects_per_s
            elif kind == _QUOTA:
                burst = float(limits.bytes_per_user)
                per_s = burst / limits.period_s
            if per_s <= 0:
                return
            shared = SharedBucket(key, self._bucket(per_s, now, burst))
        shared.bucket.refill(now)
        shared.bucket.tokens -= amount
        if not shared.users:
            self._keep(shared, now)

    def _bucket(self, per_s: float, now: float, burst: float) -> TokenBucket:
        return TokenBucket(per_s, burst or max(1.0, per_s * self.limits.burst_s), now)

    def _use(
        self, meter: Meter, key: tuple[str, str, str], per_s: float, now: float, burst: float = 0.0
    ) -> TokenBucket:
        shared = self._in_use.get(key)
        if shared is None:
            shared = self._idle.pop(key, None)
            if shared is None:
                shared = SharedBucket(key, self._bucket(per_s, now, burst))
            self._in_use[key] = shared
        shared.users += 1
        meter.shared.append(shared)
        return shared.bucket

    def _keep(self, shared: SharedBucket, now: float) -> None:
        """Remembers an unused bucket, and drops some that are full, or one too many."""
        idle = self._idle
        idle[shared.key] = shared
        for _ in range(SWEPT):
            oldest = next(iter(idle.values()), None)
            if oldest is None:
                return
            if len(idle) > self._idle_max or oldest.bucket.is_full(now):
                del idle[oldest.key]
            else:
                # Looked at again after all others.
                del idle[oldest.key]
                idle[oldest.key] = oldest


def names_of(client_id: str, username: str | None, address: str, listener: str) -> dict[str, str]:
    """A connection's name in each scope. A client without a user name shares no user's rates."""
    return {
        CLIENT: bounded_name(client_id),
        USER: bounded_name(username or ""),
        ADDRESS: address,
        LISTENER: listener,
    }


def bounded_name(name: str) -> str:
    """The name, or for a long one its beginning and digest: strangers choose names of 65,535 bytes,
    and the tables keep 100,000 of them."""
    if len(name) <= NAME_MAX:
        return name
    return f"{name[:NAME_MAX]}#{sha256(name.encode()).hexdigest()}"
