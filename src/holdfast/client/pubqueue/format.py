"""Encodes the ids of a publish queue's messages, in two forms.

Default: the payload is the application's, the id is the user property of `identity` (MQTT 5).
Compatible: `PaperFormat`, JSON payloads with an id in milliseconds, also for MQTT 3.1.1.
"""

import json
from typing import Final, Protocol

from holdfast.client.identity import SEQUENCE_MAX


class Format(Protocol):
    """The form of a queue's messages. All messages of a queue have the same one."""

    name: str
    """The name in the queue's file, because a file has messages of one form only."""
    needs_properties: bool
    """True: only MQTT 5 can transport it."""

    def next_sequence(self, last: int, clock: float) -> int:
        """The sequence of the next message, greater than `last`. `clock` is seconds since 1970."""

    def check(self, payload: bytes) -> None:
        """Raises `ValueError` for a payload that the form cannot contain."""

    def encode(self, payload: bytes, sequence: int) -> bytes:
        """The payload as it is published."""


class SequenceFormat:
    """The default form: sequences count up by one."""

    name: str = "sequence"
    needs_properties: bool = True

    def next_sequence(self, last: int, clock: float) -> int:
        """The last sequence plus one."""
        return last + 1

    def check(self, payload: bytes) -> None:
        """Accepts any payload, because the format leaves it as it is."""

    def encode(self, payload: bytes, sequence: int) -> bytes:
        """The payload itself."""
        return payload


class PaperFormat:
    """Payloads `{"id": <milliseconds since 1970>, "msg": <text>, "sender": <sender>}`.

    The id is the message's sequence; it grows by at least one per message even if the clock does
    not. With MQTT 5 a message also has the identity of the default form, for brokers that drop
    repetitions.
    """

    name: str = "paper"
    needs_properties: bool = False

    def __init__(self, sender: str) -> None:
        if not sender:
            raise ValueError("the sender's name is empty")
        self.sender = sender

    def next_sequence(self, last: int, clock: float) -> int:
        """The clock in milliseconds, or the last sequence plus one if that is greater."""
        return max(last + 1, int(clock * 1000))

    def check(self, payload: bytes) -> None:
        """Raises `ValueError` unless the payload is UTF-8."""
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the payload is not UTF-8 at byte {error.start}: JSON carries text only"
            ) from None

    def encode(self, payload: bytes, sequence: int) -> bytes:
        """The JSON object with the payload as its text."""
        message = {"id": sequence, "msg": payload.decode(), "sender": self.sender}
        return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


_PAPER_KEYS: Final = {"id", "msg", "sender"}


def parse_paper(payload: bytes) -> tuple[int, str, str]:
    """Id, message and sender of a payload in the compatible form. Another payload raises
    `ValueError`."""
    try:
        message = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(message, dict) or not message.keys() >= _PAPER_KEYS:
        raise ValueError("not a JSON object with id, msg and sender")
    sequence, text, sender = message["id"], message["msg"], message["sender"]
    if type(sequence) is not int or not 0 <= sequence <= SEQUENCE_MAX:
        raise ValueError(f"id {sequence!r}: milliseconds since 1970")
    if not isinstance(text, str) or not isinstance(sender, str):
        raise ValueError("msg and sender must be strings")
    return sequence, text, sender
