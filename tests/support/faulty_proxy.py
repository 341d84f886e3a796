"""A proxy before an S3 server, which answers for it with 500 and 503, is slow, cuts connections
and ends them in the middle of a response.

Requests pass as they are, so their signatures stay valid.
"""

import http.client
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.support.ports import free_port

SLOW_S = 2.0
TIMEOUT_S = 60.0
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")


class FaultyProxy:
    """The faults, and how many there were of each."""

    FAULTS = (
        "500 before",
        "500 after",
        "503 before",
        "503 after",
        "slow",
        "cut before",
        "cut after",
        "half after",
    )

    def __init__(self, target: str, share: float, seed: int) -> None:
        """`share` of the requests meet a fault."""
        self.target = urlsplit(target)
        self.share = share
        self.met: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def fault(self) -> str:
        """Of the next request; empty for none."""
        with self._lock:
            if self._random.random() >= self.share:
                return ""
            found = self._random.choice(self.FAULTS)
            self.met[found] += 1
            return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    proxy: FaultyProxy

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what, _, when = self.proxy.fault().partition(" ")
        if what == "slow":
            time.sleep(SLOW_S)
        if when != "before":
            try:
                status, headers, data = self._forward(body)
            except (OSError, http.client.HTTPException):  # the server is down
                what, when = "cut", "after"
        if what == "cut":
            self.close_connection = True
            return
        if what == "half":
            self.close_connection = True
        elif when:
            code = "SlowDown" if what == "503" else "InternalError"
            status, headers = int(what), []
            data = f"<Error><Code>{code}</Code></Error>".encode()
        self._respond(status, headers, data, len(data) // 2 if what == "half" else None)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        target = self.proxy.target
        assert target.hostname is not None
        server = http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT_S)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            data = response.read()
            if self.command == "HEAD":
                return response.status, response.getheaders(), b""
            headers = [h for h in response.getheaders() if h[0].lower() not in HOP_BY_HOP]
            return response.status, headers, data
        finally:
            server.close()

    def _respond(
        self, status: int, headers: list[tuple[str, str]], data: bytes, part: int | None
    ) -> None:
        """`part`: the bytes of the body that are sent, if not all are."""
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:part])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed closes its connections; other errors are printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextmanager
def faulty_proxy(target: str, share: float, seed: int) -> Iterator[tuple[FaultyProxy, str]]:
    """The proxy and its address."""
    proxy = FaultyProxy(target, share, seed)
    handler = type("OwnHandler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", free_port()), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
