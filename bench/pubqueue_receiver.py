"""The subscriber of the Publish Queue benchmark: takes what the publisher sends and judges it."""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

from bench import wire
from bench.connection import Connection
from bench.wire import Frame

RECEIVE_TIMEOUT_S: Final = 20.0
DUP: Final = 0x08
NUMBER_BYTES: Final = 4


class Receiver:
    """Receives in a thread of its own, as cheaply as it can be done: it shares the machine with
    the broker and the publisher. `end` is the number after which nothing more comes."""

    def __init__(self, port: int, topic: str, qos: int, payload_bytes: int, end: int) -> None:
        self._frame = Frame(topic, qos, payload_bytes)
        self._end = end
        self._connection = Connection(port, "bench-receiver")
        self._connection.subscribe(topic, qos)
        self._connection.socket.settimeout(RECEIVE_TIMEOUT_S)
        self.numbers: list[int] = []
        """Of all messages, in the order in which they came, `end` left out."""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> list[int]:
        """Waits for the end. Raises what went wrong."""
        self._thread.join()
        self._connection.close()
        if self.error is not None:
            raise self.error
        return self.numbers

    def abandon(self) -> None:
        """When the publisher has failed: nothing more comes."""
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            while not self._take(self._connection.receive()):
                pass
        except Exception as error:  # noqa: BLE001
            # Raised to whoever joins.
            self.error = error

    def _take(self, data: bytes) -> bool:
        """Answers the whole packets in `data`; whether the end was among them."""
        frame, reply, at = self._frame, bytearray(), 0
        ended = False
        while at < len(data):
            is_release = data[at] == wire.PUBREL
            end = at + (wire.ACK_BYTES if is_release else frame.bytes)
            if end > len(data):
                break
            if is_release:
                reply += bytes([wire.PUBCOMP, 2]) + data[at + 2 : end]
            else:
                reply += self._accept(data[at:end])
                ended = ended or self._is_end(data[at:end])
            at = end
        self._connection.rest = data[at:]
        if reply:
            self._connection.socket.sendall(reply)
        return ended

    def _accept(self, packet: bytes) -> bytes:
        frame = self._frame
        if (
            packet[0] & ~DUP != frame.first_byte
            or packet[1 : frame.id_at] != frame.blank[1 : frame.id_at]
        ):
            raise ValueError(f"not a message of this benchmark: {packet!r}")
        if not self._is_end(packet):
            self.numbers.append(self._number(packet))
        first_byte = wire.PUBREC if frame.qos == 2 else wire.PUBACK
        return bytes([first_byte, 2]) + packet[frame.id_at : frame.payload_at]

    def _number(self, packet: bytes) -> int:
        at = self._frame.payload_at
        return int(packet[at : at + NUMBER_BYTES])

    def _is_end(self, packet: bytes) -> bool:
        return self._number(packet) == self._end


def judge(numbers: Sequence[int], count: int) -> str:
    """What is wrong with what arrived, "" if it is 1 to `count`, in order, each once."""
    counted = Counter(numbers)
    faults = []
    missing = sum(number not in counted for number in range(1, count + 1))
    double = sum(times - 1 for times in counted.values())
    foreign = sum(not 1 <= number <= count for number in counted)
    firsts = list(dict.fromkeys(numbers))
    if missing:
        faults.append(f"{missing} missing")
    if double:
        faults.append(f"{double} double")
    if foreign:
        faults.append(f"{foreign} never sent")
    if firsts != sorted(firsts):
        faults.append("out of order")
    return ", ".join(faults)
