"""Pages of sorted rows.

A page continues behind a key and a name, not at a number of rows. So a row that appears or
disappears between two requests neither repeats nor hides another one.
"""

import base64
import binascii
from typing import Final, Generic, TypeVar

from msgspec import DecodeError, Struct, json

from holdfast.api.endpoints import Call, Text, Whole, bad_request
from holdfast.security.http.requests import shown

T = TypeVar("T")
SortKey = str | int | float
Place = tuple[SortKey, str]
"""The sort key of a row and its unique name."""

PAGE_MAX: Final = 1000
"""The most rows of one page."""
CURSOR_CHARACTERS_MAX: Final = 262_144

LIMIT: Final = Whole("limit", "the most rows of the page", least=1, most=PAGE_MAX, default=100)
AFTER: Final = Text("after", "`next` of the page before", most=CURSOR_CHARACTERS_MAX)
_PLACE: Final[json.Decoder[Place]] = json.Decoder(Place)


class BadCursor(ValueError):
    """A cursor that no page has given."""


def encode_place(place: Place) -> str:
    """The cursor behind a row, as text for a URL."""
    return base64.urlsafe_b64encode(json.encode(place)).decode().rstrip("=")


def decode_place(text: str) -> Place:
    """The place of a cursor. Raises `BadCursor`."""
    try:
        return _PLACE.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, DecodeError) as error:
        raise BadCursor("a cursor is the `next` of an earlier page") from error


def place_after(call: Call, *, is_number: bool = False) -> Place | None:
    """The place behind which a page begins; None: at the start. Raises `ApiRefusal` (400)."""
    text = call.get(AFTER)
    if text is None:
        return None
    try:
        place = decode_place(text)
        if isinstance(place[0], str) is is_number:
            raise BadCursor("the cursor is of a list with another order")
    except BadCursor as error:
        raise bad_request(f"after={shown(text)}: {error}") from None
    return place


class AbsentNode(Struct):
    """A node whose part is missing in a reply."""

    node: str
    reason: str


class BestRows(Generic[T]):
    """The first `limit` items behind a place, of items that are added in any order.

    Memory: at most 2 * limit items, because the others are dropped each time that is exceeded.
    """

    def __init__(self, limit: int, after: Place | None, *, descending: bool) -> None:
        self._limit = limit
        self._after = after
        self._descending = descending
        self._found: list[tuple[Place, T]] = []
        # Places that are not before this one are dropped; None: there is room.
        self._bound: Place | None = None
        self.matched = 0
        """The items added, those of other pages included."""

    def add(self, place: Place, item: T) -> None:
        """Adds an item. All places of one selection have keys of one type."""
        self.matched += 1
        if self._after is not None and not self._is_before(self._after, place):
            return
        if self._bound is not None and not self._is_before(place, self._bound):
            return
        self._found.append((place, item))
        if len(self._found) >= 2 * self._limit:
            self._cut()

    def _is_before(self, one: Place, other: Place) -> bool:
        return one > other if self._descending else one < other

    def _cut(self) -> None:
        self._found.sort(key=lambda entry: entry[0], reverse=self._descending)
        del self._found[self._limit :]
        if len(self._found) == self._limit:
            self._bound = self._found[-1][0]

    def page(self) -> list[T]:
        """The items of the page, in order."""
        self._cut()
        return [item for _, item in self._found]

    def following(self) -> str:
        """The cursor of the next page; empty if this is the last one."""
        self._cut()
        return encode_place(self._found[-1][0]) if len(self._found) == self._limit else ""
