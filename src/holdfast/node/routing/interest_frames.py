"""Payloads of the frames INTEREST and INTEREST_ACK, as JSON objects."""

from typing import Final

from msgspec import Struct, json


class Interest(Struct):
    """The filters of the sender's connected subscribers: added and removed ones.

    `whole`: every filter that is not in `added` is removed. `number`: 0 if the rest of the change
    follows in further frames.
    """

    number: int
    whole: bool
    added: list[str]
    removed: list[str]


class InterestAck(Struct):
    """The number of the last INTEREST that the sender has applied."""

    number: int


INTEREST_DECODER: Final = json.Decoder(Interest)
INTEREST_ACK_DECODER: Final = json.Decoder(InterestAck)
