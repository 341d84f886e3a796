"""Throws mutated packets at the decoders, or with --port at a running broker.

    python tools/fuzz.py --seconds 60 [--seed N]
    python tools/fuzz.py --seconds 60 --port 1883 [--host 127.0.0.1]

The decoders may give a packet or a ProtocolViolation; a packet must encode and come out equal
when decoded again. A broker may answer or not, but must have closed the connection soon after
our side of it ended, and must go on serving others. Anything else is printed with the bytes that
caused it, and the exit status is 1. The same seed gives the same cases.
"""

import argparse
import random
import socket
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from holdfast.protocol.mqtt import decode as codec
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.framing import FrameReader, frame
from holdfast.protocol.mqtt.packets import Connack, Connect, Packet, Pingresp
from holdfast.protocol.mqtt.reasons import NAMES
from tests.data.packets import CASES
from tests.fuzz.mutation import INTERESTING, damage

PACKET_BYTES_MAX = 1 << 20
CLOSE_TIMEOUT_S = 10.0
"""A broker that has not closed by then counts as hung."""
HEALTH_EVERY_CASES = 50
REPORT_EVERY_S = 10.0
PACKETS = [case.data for case in CASES]


class Failure(Exception):
    """What must not happen. The text says what did."""


class Mutator:
    """Makes byte streams out of the corpus."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def stream(self) -> tuple[bytes, int, bool]:
        """Some packets in a row, mostly damaged; the version and direction to read them in."""
        rng = self.random
        case = rng.choice(CASES)
        version, from_client = case.version, case.from_client
        if rng.random() < 0.1:
            version = rng.choice((3, 4, 5))
        if rng.random() < 0.05:
            from_client = not from_client
        packets = [self.packet(case.data)]
        while rng.random() < 0.3:
            packets.append(self.packet(rng.choice(CASES).data))
        return b"".join(packets), version, from_client

    def packet(self, data: bytes) -> bytes:
        """A packet with some damage, and in most cases a remaining length that fits it."""
        rng = self.random
        start = 3 if data[1] >= 128 else 2
        first, body = data[0], damage(rng, data[start:], PACKETS)
        if rng.random() < 0.05:
            first ^= 1 << rng.randrange(8)
        if rng.random() < 0.9:
            return frame(first, body)
        length = bytes(rng.choice(INTERESTING) for _ in range(rng.randrange(1, 6)))
        return bytes((first,)) + length + body


def read_packets(
    reader: FrameReader, version: int, from_client: bool, packets: list[Packet]
) -> None:
    while reader.next():
        packets.append(
            decode(reader.buffer, reader.first, reader.start, reader.end, version, from_client)
        )


def check_decoders(data: bytes, version: int, from_client: bool, split: int) -> str:
    """What the decoders make of it, for the statistics. Raises whatever they should not."""
    reader = FrameReader(PACKET_BYTES_MAX)
    packets: list[Packet] = []
    outcome = "need more"
    try:
        reader.feed(data[:split])
        read_packets(reader, version, from_client, packets)
        reader.feed(data[split:])
        read_packets(reader, version, from_client, packets)
        if reader.buffer == b"":
            outcome = "packets"
    except ProtocolViolation as error:
        outcome = NAMES[error.reason]
        if not str(error):
            raise Failure("a violation without a text") from None
    for packet in packets:
        own = packet.protocol_level if isinstance(packet, Connect) else version
        again = FrameReader(PACKET_BYTES_MAX)
        again.feed(encode(packet, own))
        decoded: list[Packet] = []
        read_packets(again, own, from_client, decoded)
        if decoded != [packet]:
            raise Failure(f"{packet!r} came back as {decoded!r}")
    return outcome


class Broker:
    """A live broker, seen from outside."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)

    def connect(self) -> socket.socket:
        try:
            return socket.create_connection(self.address, CLOSE_TIMEOUT_S)
        except OSError as error:
            raise Failure(f"no connection to the broker any more: {error}") from None

    def check(self, data: bytes, version: int, split: int, open_first: bool) -> str:
        with self.connect() as client:
            try:
                if open_first:
                    client.sendall(encode(Connect(version, True, 60, ""), version))
                    client.recv(4096)
                client.sendall(data[:split])
                client.sendall(data[split:])
                client.shutdown(socket.SHUT_WR)
                return "answered" if self.read_to_end(client) else "closed"
            except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
                return "closed"
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise Failure("the broker neither answers nor closes") from None
                # shutdown() on a connection that the broker has closed
                return "closed"

    def read_to_end(self, client: socket.socket) -> bool:
        answered = False
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while client.recv(65536):
            answered = True
            if time.monotonic() > deadline:
                raise TimeoutError
        return answered

    def check_health(self) -> None:
        """A new client gets CONNACK and PINGRESP."""
        with self.connect() as client:
            try:
                client.sendall(encode(Connect(4, True, 60, ""), 4) + b"\xc0\x00")
                reader = FrameReader(PACKET_BYTES_MAX)
                packets: list[Packet] = []
                while len(packets) < 2:
                    data = client.recv(4096)
                    if not data:
                        raise Failure("the broker closes on a good client")
                    reader.feed(data)
                    read_packets(reader, 4, False, packets)
                client.sendall(b"\xe0\x00")
            except OSError as error:
                raise Failure(f"the broker does not serve a good client: {error}") from None
        if packets != [Connack(False, 0), Pingresp()]:
            raise Failure(f"the broker answers a good client with {packets}")


def run(options: argparse.Namespace) -> int:
    mutator = Mutator(options.seed)
    broker = Broker(options.host, options.port) if options.port else None
    outcomes: Counter[str] = Counter()
    cases = 0
    begin = reported = time.monotonic()
    print(f"seed {options.seed}, codec {codec.__file__}", flush=True)
    while time.monotonic() - begin < options.seconds and cases < options.cases:
        data, version, from_client = mutator.stream()
        split = mutator.random.randrange(len(data) + 1)
        try:
            if broker is None:
                outcomes[check_decoders(data, version, from_client, split)] += 1
            else:
                open_first = mutator.random.random() < 0.7
                outcomes[broker.check(data, version, split, open_first)] += 1
                if cases % HEALTH_EVERY_CASES == 0:
                    broker.check_health()
        except Exception:  # noqa: BLE001 - whatever it is, it must not happen
            traceback.print_exc()
            print(f"case {cases} of seed {options.seed}, version {version}, split {split}")
            print(f"bytes {data.hex()}")
            return 1
        cases += 1
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"{cases} cases, {cases / (reported - begin):.0f}/s", flush=True)
    if broker is not None:
        broker.check_health()
    elapsed_s = time.monotonic() - begin
    print(f"{cases} cases in {elapsed_s:.1f} s, {cases / elapsed_s:.0f}/s, nothing unexpected")
    for name, count in outcomes.most_common():
        print(f"  {count:9} {name}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="fuzz the MQTT decoders, or a running broker")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="stop after so many")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="of a broker; without: the decoders")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    try:
        return run(options)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
