"""Announcements in frames of bounded size, with the vouchers that belong to them."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from holdfast_federation.core.frames import (
    FILTERS_MAX,
    Announcement,
    Announcements,
    Voucher,
    Vouchers,
    encode,
)
from holdfast_federation.core.routing.link_state import LinkStateEntry, announcements

FRAME_ENTRIES_MAX: Final = 256
FRAME_FILTERS_MAX: Final = 4 * FILTERS_MAX
Key = tuple[bytes, int, int]
"""The key of an announcement: origin, epoch and version."""


class PendingNews(NamedTuple):
    announcement: Announcement
    voucher: Voucher | None
    source: bytes | None
    """The peer that sent it; None for this member."""


def key_of(news: Announcement) -> Key:
    return (news.origin, news.epoch, news.version)


def encoded(news: Sequence[PendingNews]) -> list[bytes]:
    """Returns frames, each after a frame with the vouchers of its announcements."""
    vouchers = {key_of(each.announcement): each.voucher for each in news}
    frames = []
    for frame in frames_of([each.announcement for each in news]):
        found = {key_of(entry): vouchers[key_of(entry)] for entry in frame.entries}
        told = [voucher for voucher in found.values() if voucher is not None]
        if told:
            frames.append(encode(Vouchers(told)))
        frames.append(encode(frame))
    return frames


def by_key(frame: Vouchers) -> dict[Key, Voucher]:
    return {(each.origin, each.epoch, each.version): each for each in frame.entries}


def frames_of(news: Sequence[Announcement]) -> list[Announcements]:
    """Returns the announcements in frames of bounded size, in the same order."""
    frames = []
    batch: list[Announcement] = []
    filters = 0
    for entry in news:
        count = len(entry.added) + len(entry.removed)
        if batch and (len(batch) == FRAME_ENTRIES_MAX or filters + count > FRAME_FILTERS_MAX):
            frames.append(Announcements(batch))
            batch, filters = [], 0
        batch.append(entry)
        filters += count
    if batch:
        frames.append(Announcements(batch))
    return frames


def encode_entries(
    entries: Iterable[LinkStateEntry], own: bytes, now: float, age_told_s: float
) -> list[bytes]:
    """Returns the entries as frames, with vouchers for signed and for old ones."""
    news: list[PendingNews] = []
    for entry in entries:
        age_s = max(0.0, now - entry.received_at)
        is_own = entry.origin == own
        voucher = entry.voucher
        if voucher is not None:
            voucher = replace(voucher, age_s=0.0 if is_own else age_s)
        elif age_s >= age_told_s and not is_own:
            voucher = Voucher(entry.origin, entry.epoch, entry.version, age_s)
        news += [PendingNews(part, voucher, None) for part in announcements(entry)]
    return encoded(news)
