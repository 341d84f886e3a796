"""A small S3 server inside the test, whose failures the test chooses.

It keeps objects in memory and knows the requests that a lake and pyiceberg make, without
signatures. The tests marked `long` use a real server, see radosgw.py.
"""

import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from tests.support.ports import free_port

BUCKET = "lake"


@dataclass
class Refusal:
    """A response in place of the right one. With `after`, the request has its effect first."""

    status: int
    code: str = "InternalError"
    after: bool = False


@dataclass
class SmallS3:
    """The objects, and the failures of the requests to come."""

    objects: dict[str, bytes] = field(default_factory=dict)
    refuse: Callable[[str, str], Refusal | None] = lambda method, key: None
    """Is called with each request, in their order."""
    is_conditional: bool = True
    """False: If-None-Match is ignored."""
    check_s: float = 0.0
    """How long before the write the condition is checked. More than 0 is what Swift does."""
    forgets: Callable[[str], bool] = lambda key: False
    """Whether an object is acknowledged and not kept."""
    requests: int = 0
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """The parts of uploads that are not complete, by key and number."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, data: bytes, only_new: bool) -> bool:
        if only_new and self.is_conditional and self.check_s:
            if key in self.objects:
                return False
            time.sleep(self.check_s)
            only_new = False
        with self.lock:
            if only_new and self.is_conditional and key in self.objects:
                return False
            if not self.forgets(key):
                self.objects[key] = data
        return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    s3: SmallS3

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").strip("/")
        query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
        body = self.body()
        with self.s3.lock:
            self.s3.requests += 1
            refusal = self.s3.refuse(self.command, key)
        if refusal is None or refusal.after:
            status, headers, data = self.response(key, query, body)
        if refusal is not None:
            status, headers = refusal.status, {}
            data = f"<Error><Code>{refusal.code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("Content-Length", str(len(data))))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        """The content of a request. That of a stream is in chunks, and these in those of S3, which
        carry a checksum."""
        data: IO[bytes] = self.rfile
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = io.BytesIO(_without_chunks(data))
        else:
            data = io.BytesIO(data.read(int(self.headers.get("Content-Length") or 0)))
        is_chunked = "aws-chunked" in self.headers.get("Content-Encoding", "")
        return _without_chunks(data) if is_chunked else data.read()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

    def response(
        self, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        s3 = self.s3
        if "list-type" in query:
            return 200, {}, self.listing(query)
        if "delete" in query:
            keys = [each.split("</Key>")[0] for each in body.decode().split("<Key>")[1:]]
            for each in keys:
                s3.objects.pop(unescape(each), None)
            gone = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
            return 200, {}, f"<DeleteResult>{gone}</DeleteResult>".encode()
        if "uploads" in query or "uploadId" in query:
            return self.part(key, query, body)
        if self.command == "DELETE":
            s3.objects.pop(key, None)
            return 204, {}, b""
        if self.command == "PUT":
            return self.written(key, body)
        data = s3.objects.get(key)
        if data is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        headers = {"ETag": _tag(data), "Last-Modified": formatdate(usegmt=True)}
        asked = self.headers.get("Range")
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": str(len(data))}, b""
        if not asked:
            return 200, headers, data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = (int(first), int(last or len(data) - 1)) if first else (-int(last), len(data))
        if start >= len(data):
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        part = data[start : end + 1]
        start %= len(data)
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return 206, headers, part

    def part(
        self, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """An upload in parts: its begin, a part, and its end."""
        if "uploads" in query:
            begun = "<UploadId>1</UploadId>"
            return (
                200,
                {},
                f"<InitiateMultipartUploadResult>{begun}</InitiateMultipartUploadResult>".encode(),
            )
        parts = self.s3.parts.setdefault(key, {})
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": _tag(body)}, b""
        data = b"".join(parts[number] for number in sorted(self.s3.parts.pop(key)))
        self.s3.put(key, data, False)
        done = f"<Key>{escape(key)}</Key><ETag>{_tag(data)}</ETag>"
        return (
            200,
            {},
            f"<CompleteMultipartUploadResult>{done}</CompleteMultipartUploadResult>".encode(),
        )

    def written(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            data = self.s3.objects.get(unquote(source).strip("/").removeprefix(f"{BUCKET}/"))
            if data is None:
                return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
            self.s3.put(key, data, False)
            text = f"<CopyObjectResult><ETag>{_tag(data)}</ETag></CopyObjectResult>"
            return 200, {}, text.encode()
        if not self.s3.put(key, body, self.headers.get("If-None-Match") == "*"):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        return 200, {"ETag": _tag(body)}, b""

    def listing(self, query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        names = sorted(n for n in self.s3.objects if n.startswith(prefix) and n > after)
        folders = set()
        if query.get("delimiter"):
            below = {n: n[len(prefix) :].split("/") for n in names}
            folders = {prefix + parts[0] + "/" for parts in below.values() if len(parts) > 1}
            names = [n for n in names if len(below[n]) == 1]
        entries = [
            f"<Contents><Key>{escape(n)}</Key><Size>{len(self.s3.objects.get(n, b''))}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for n in names
        ]
        entries += [
            f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>"
            for n in sorted(folders)
        ]
        return f"<ListBucketResult>{''.join(entries)}</ListBucketResult>".encode()


def _without_chunks(data: IO[bytes]) -> bytes:
    """The content of chunks, each behind its length in hexadecimal."""
    found = []
    while size := int(data.readline().partition(b";")[0], 16):
        found.append(data.read(size))
        data.readline()
    while data.readline().strip():
        pass  # A trailer, such as a checksum.
    return b"".join(found)


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextmanager
def small_s3(patch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    """Serve objects, and let the environment name the server."""
    from holdfast.client.log.lake import objects

    s3 = SmallS3()
    handler = type("OwnHandler", (Handler,), {"s3": s3})
    server = ThreadingHTTPServer(("127.0.0.1", free_port()), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    patch.setenv("AWS_ACCESS_KEY_ID", "id")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    objects.client.cache_clear()
    try:
        yield s3
    finally:
        objects.client.cache_clear()
        server.shutdown()
        server.server_close()
        thread.join()
