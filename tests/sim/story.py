"""What the log tells of the sessions: when each was opened, closed, ended, and its will published.

All times are of the records, so of the clock of the node that decided: a node that measures a delay
or an interval does so by one clock.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.session.session import NEVER_EXPIRES
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SubscribeRecord,
    UnsubscribeRecord,
    decode_record,
)

TOLERANCE_S: Final = 0.05
"""A node's clock is as old as its turn."""


class Life:
    """A session under one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.opened_us = -1
        self.is_clean = False
        # There was no session that it could go on with.
        self.is_new = False
        self.will = ""
        self.will_delay_s = 0
        # When it was closed with its will still due, and without; each by whoever thought so.
        self.closed_us: list[int] = []
        self.has_will_left: list[bool] = []
        self.is_closed_by_its_node = True
        """Else it may have been closed in the place of a node that was held up, while the client
        was connected for all it knew."""
        self.expiry_s = 0
        self.ended_us = -1
        self.fired_us = -1


def _epoch(life: Life) -> int:
    return life.epoch


class SessionStory:
    """`fail`: a violation."""

    def __init__(self, fail: Callable[[str], NoReturn]) -> None:
        self._fail = fail
        # Per client, by epoch.
        self.lives: dict[str, dict[int, Life]] = {}
        # The clients with a session.
        self._there: set[str] = set()
        # Per client, by filter: where its first SUBSCRIBE found the log.
        self.starts: dict[str, dict[str, list[int]]] = {}
        # Per client: how often its session has ended.
        self.ends: dict[str, int] = {}
        # Per client: called when its session ends that its node has closed.
        self.on_end: dict[str, Callable[[], None]] = {}

    def _life(self, client_id: str, epoch: int) -> Life:
        return self.lives.setdefault(client_id, {}).setdefault(epoch, Life(epoch))

    def take(self, record: Record) -> None:
        """A record is committed."""
        if record.kind == log_record.SESSION:
            self._take_session(record)
        elif record.kind == log_record.MESSAGE and record.flags & log_record.FLAG_WILL:
            life = self._life(record.client_id.decode(), record.sequence)
            life.fired_us = record.timestamp_us

    def _take_session(self, record: Record) -> None:
        client_id = record.client_id.decode()
        change = decode_record(record.payload)
        lives = self.lives.setdefault(client_id, {})
        newest = max((epoch for epoch, life in lives.items() if life.opened_us >= 0), default=0)
        if record.sequence < newest:
            # Of an owner before.
            return
        life = self._life(client_id, record.sequence)
        if isinstance(change, OpenRecord):
            if record.sequence == newest:
                return
            life.opened_us = record.timestamp_us
            life.is_clean = change.clean
            life.is_new = change.clean or client_id not in self._there
            self._there.add(client_id)
            life.expiry_s = change.expiry_s
            if change.will is not None:
                life.will = change.will.payload.decode()
                life.will_delay_s = change.will.delay_s
        elif isinstance(change, CloseRecord):
            life.closed_us.append(record.timestamp_us)
            life.has_will_left.append(change.will)
            if change.maybe_sent:
                life.is_closed_by_its_node = False
            life.expiry_s = change.expiry_s
        elif isinstance(change, SubscribeRecord):
            for row in change.subscriptions:
                self.starts.setdefault(client_id, {}).setdefault(row[0], change.start)
        elif isinstance(change, UnsubscribeRecord):
            for filter in change.filters:
                self.starts.get(client_id, {}).pop(filter, None)
        elif isinstance(change, EndRecord) and life.ended_us < 0:
            life.ended_us = record.timestamp_us
            self.starts.pop(client_id, None)
            self._there.discard(client_id)
            self.ends[client_id] = self.ends.get(client_id, 0) + 1
            if client_id in self.on_end and life.is_closed_by_its_node:
                self.on_end[client_id]()

    def has_will(self, client_id: str, text: str) -> bool:
        return any(life.will == text for life in self.lives.get(client_id, {}).values())

    def is_new(self, client_id: str, epoch: int) -> bool:
        life = self.lives.get(client_id, {}).get(epoch)
        return life is not None and life.is_new

    def still_due(self, client_id: str) -> str:
        """Of a client that has gone: what is still to come; "": nothing."""
        lives = self.lives.get(client_id, {}).values()
        newest = max((life for life in lives if life.opened_us >= 0), key=_epoch, default=None)
        if newest is None:
            return ""
        if not newest.closed_us:
            return f"the session of {client_id}, epoch {newest.epoch}, is not closed"
        if newest.will and all(newest.has_will_left) and newest.fired_us < 0:
            return f"the will {newest.will} has not come"
        return ""

    # At the end

    def check(self, skew_s: float) -> None:
        """`skew_s`: how far two clocks may have been apart."""
        tolerance_us = int((TOLERANCE_S + skew_s) * 1e6)
        for client_id, lives in self.lives.items():
            ordered = [lives[epoch] for epoch in sorted(lives)]
            for number, life in enumerate(ordered):
                later = ordered[number + 1 :]
                following = next((each for each in later if each.opened_us >= 0), None)
                if life.fired_us >= 0:
                    self._check_will(client_id, life, following, tolerance_us)
                if life.ended_us >= 0:
                    self._check_end(client_id, life, tolerance_us)

    def _check_will(
        self, client_id: str, life: Life, following: Life | None, tolerance_us: int
    ) -> None:
        text = f"the will {life.will} of {client_id}, epoch {life.epoch},"
        if not any(life.has_will_left):
            self._fail(f"{text} was published, though its session was not closed with it")
        delay_s = min(life.will_delay_s, life.expiry_s)
        due_us = min(life.closed_us) + delay_s * 1_000_000 - tolerance_us
        is_ended = following is not None and following.is_clean
        if not is_ended and life.fired_us < due_us:
            early_s = (due_us - life.fired_us) / 1e6
            self._fail(f"{text} was published {early_s:.2f} s before it was due")
        if following is not None and not is_ended and following.opened_us < due_us:
            self._fail(f"{text} was published, though the session was back before it was due")

    def _check_end(self, client_id: str, life: Life, tolerance_us: int) -> None:
        if life.expiry_s == NEVER_EXPIRES:
            self._fail(f"the session of {client_id}, which never expires, was ended")
        if not life.expiry_s:
            return
        if not life.closed_us:
            self._fail(f"the session of {client_id} was ended while it was open")
        since_us = min(life.closed_us)
        if life.ended_us < since_us + life.expiry_s * 1_000_000 - tolerance_us:
            after_s = (life.ended_us - since_us) / 1e6
            self._fail(
                f"the session of {client_id} was ended after {after_s:.2f} s, of {life.expiry_s}"
            )
