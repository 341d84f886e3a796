"""Drives the process that reads the lake of a node (`cli.log.lake_reader`).

The process begins with the broker, so that no reader waits for the start of Arrow. One that ends is
started again, and one that does not answer is killed: a store that hangs stops nothing else.
"""

import asyncio
import struct
import sys
from collections.abc import Callable
from typing import Final, cast

import msgspec

from holdfast.io.event_loop.failures import watched
from holdfast.log.record import Record
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.reads.fetch_frames import FetchedFrame, FetchFrame, decode_fetched, encode_fetch
from holdfast.node.reads.lake_source import ANSWER_S, FAILURE, LAKE, PIECE, LakeAccess
from holdfast.node.reads.remote_reads import RemoteReads

READER: Final = "holdfast.cli.log.lake_reader"
CHECK_S: Final = 1.0
"""The interval in seconds of the checks, and the least time between two starts of the process."""
GREET_S: Final = 10.0
"""The interval in seconds at which a lake that is away is tried, also without a reader."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""The most bytes of a piece of an answer. A record has at most 2 MiB by default."""

_LENGTH: Final = struct.Struct("<I")

OWN_NUMBERS: Final = 1 << 62
"""The number from which the requests of `request` are counted. Those of the node are below it."""
REQUESTS_MAX: Final = 2
"""The most requests of the admin port at once."""


class LakeAwayError(Exception):
    """The lake cannot be read now. The text says why."""


class LakePort(asyncio.SubprocessProtocol):
    """The lake of a node: it sends FETCHes to the process, and hands over the answers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        place: str,
        reads: RemoteReads,
        touch: Callable[[], None],
        greeting: Callable[[], FetchFrame | None],
    ) -> None:
        """`touch`: see `Broker.touch`. `greeting`: makes a FETCH of nothing, by which the process
        checks the lake; None: the node has no metadata yet."""
        self._loop = loop
        self._place = place
        self._reads = reads
        self._touch = touch
        self._greeting = greeting
        self._process: asyncio.SubprocessTransport | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._is_open = True
        self._received = bytearray()
        # The requests without an answer, and the time of the last sign of the process.
        self._waiting = 0
        self._heard_at = 0.0
        self._greet_at = 0.0
        # The requests of the admin port, with the records so far.
        self._requests: dict[int, tuple[asyncio.Future[FetchedFrame], list[Record]]] = {}
        self._number = OWN_NUMBERS
        self._room = asyncio.Semaphore(REQUESTS_MAX)
        self._timer = loop.call_soon(self._check)
        reads.lake.ask = self._ask

    async def request(self, frame: FetchFrame) -> tuple[FetchedFrame, list[Record]]:
        """Sends a FETCH of the admin port, which gets the log's id and generation. Raises
        LakeAwayError."""
        async with self._room:
            greeting = self._greeting()
            if greeting is None or self._process is None or not self._is_open:
                raise LakeAwayError("the process that reads the lake is starting")
            self._number += 1
            frame.number, frame.log = self._number, greeting.log
            frame.generation = greeting.generation
            records: list[Record] = []
            future: asyncio.Future[FetchedFrame] = self._loop.create_future()
            self._requests[frame.number] = future, records
            try:
                self._ask(encode_fetch(frame))
                return await future, records
            finally:
                del self._requests[frame.number]

    async def stop(self) -> None:
        """Ends the process. Readers go on without a lake."""
        self._is_open = False
        self._fail_requests("the lake is closed")
        self._timer.cancel()
        self._touch()
        self._reads.lake = LakeAccess()
        self._reads.disconnected(LAKE)
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._process is not None:
            self._stopped = self._loop.create_future()
            self._process.kill()
            await self._stopped

    # The process

    def _check(self) -> None:
        """Starts the process unless it runs, kills one that hangs, tries a lake that is away."""
        self._timer = self._loop.call_later(CHECK_S, self._check)
        now = self._loop.time()
        if self._process is None:
            if self._starting is None or self._starting.done():
                self._starting = watched(self._start())
        elif self._waiting and now > self._heard_at + ANSWER_S:
            self._fail(f"the lake {self._place} has not answered for {ANSWER_S:g} s")
            self._process.kill()
        elif now >= self._greet_at and not self._waiting:
            self._greet()

    def _greet(self) -> None:
        """Tries the lake, once the node has metadata."""
        frame = self._greeting()
        if frame is not None:
            self._greet_at = self._loop.time() + GREET_S
            self._ask(encode_fetch(frame))

    async def _start(self) -> None:
        try:
            await self._loop.subprocess_exec(
                lambda: self,
                sys.executable, "-m", READER, self._place,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=None,
                # Ctrl-C reaches the node alone. The process ends with its input.
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._fail(f"the process that reads the lake cannot start: {error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The classes of uvloop are not derived from asyncio's.
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._received.clear()
        self._waiting, self._greet_at = 0, 0.0
        self._greet()

    def process_exited(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        code = process.get_returncode()
        process.close()
        if self._stopped is not None:
            self._stopped.set_result(None)
        elif self._is_open:
            self._fail(f"the process that reads the lake ended with exit code {code}")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        received = self._received
        received += data
        self._heard_at = self._loop.time()
        while len(received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received)
            end = _LENGTH.size + length
            if not 0 < length <= ANSWER_BYTES_MAX:
                self._reject(f"a message of {length} bytes")
                return
            if len(received) < end:
                return
            message = bytes(received[_LENGTH.size : end])
            del received[:end]
            self._take(message[0], message[1:])

    # Requests and answers

    def _ask(self, payload: bytes) -> None:
        """Sends a FETCH."""
        process = self._process
        if process is None or process.is_closing():
            # Not in the middle of what sends it.
            self._loop.call_soon(self._fail, "the process that reads the lake is starting")
            return
        if not self._waiting:
            self._heard_at = self._loop.time()
        self._waiting += 1
        pipe = cast(asyncio.WriteTransport, process.get_pipe_transport(0))
        pipe.write(_LENGTH.pack(len(payload)) + payload)

    def _take(self, kind: int, payload: bytes) -> None:
        if not self._is_open:
            return
        if kind != PIECE:
            self._waiting -= 1
        if kind == FAILURE:
            is_final, text = msgspec.json.decode(payload, type=tuple[bool, str])
            self._fail(text, is_final=is_final)
            return
        self._touch()
        try:
            if self._requests and self._take_own(payload):
                return
            self._reads.handle(LAKE, payload)
        except BadFrame as error:
            self._reject(str(error))

    def _take_own(self, payload: bytes) -> bool:
        """Takes a piece of an answer for the admin port. Returns False if it is for the node.
        Raises BadFrame."""
        head, found = decode_fetched(payload)
        if head.number <= OWN_NUMBERS:
            return False
        # A request that was cancelled has no entry.
        future, records = self._requests.get(head.number, (None, []))
        records += found
        if future is not None and not head.more and not future.done():
            future.set_result(head)
        return True

    def _fail_requests(self, text: str) -> None:
        for future, _ in self._requests.values():
            if not future.done():
                future.set_exception(LakeAwayError(text))

    def _reject(self, text: str) -> None:
        """Ends a process whose answers cannot be used."""
        self._fail(f"the process that reads the lake sent {text}")
        if self._process is not None:
            self._process.kill()

    def _fail(self, text: str, *, is_final: bool = False) -> None:
        if self._is_open:
            self._touch()
            self._greet_at = self._loop.time() + GREET_S
            self._fail_requests(text)
            self._reads.lake_failed(text, is_final=is_final)
