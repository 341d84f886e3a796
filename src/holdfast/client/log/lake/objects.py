"""Names in an object store, with the methods of `pathlib.Path` that a lake uses.

An object store has no rename, no lock and no directories. It can create an object only if there is
none of that name, and it can copy one. The lake needs no more:

- A commit is one object that is *created*. Of two drivers that create it, one succeeds.
- A file is *copied* from its staged name to its final one, and then its staged name is removed.

Requests that fail with 5xx, 429 or no response are repeated for at most RETRY_S, or SHORT_RETRY_S
after `shorten_retries`. Those whose response ends within its body are sent up to CUT_MAX times.

A store that lets two writers create one object is refused. Counter-example: OpenStack Swift checks
the condition before it writes. Two drivers that create the same commit at the same time both
succeed, the later one overwrites the other, and the rows of the first are lost.
"""

import io
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from holdfast.client.log.lake.errors import CredentialsError, LakeError, ObjectStoreError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore


Response = TypeVar("Response")
SCHEMES: Final = ("s3", "gs", "abfss", "az")
RETRY_S: Final = 120.0
"""The seconds for which a request is repeated."""
RETRIES_MAX: Final = 12
SHORT_RETRY_S: Final = 10.0
"""The seconds for which a process repeats a request whose caller asks it again."""
SHORT_RETRIES_MAX: Final = 4
BACKOFF_MAX_S: Final = 10.0
"""The most seconds between two attempts."""
REQUEST_S: Final = 30.0
"""The seconds that one attempt may take, its body included."""
PART_BYTES: Final = 8 << 20
"""The bytes of a part of a large file. A part of 8 MiB needs 280 KB/s to be sent in REQUEST_S."""
AT_ONCE: Final = 8
"""The most requests that are made at the same time."""
CUT_MAX: Final = 5
"""The most times that a request is sent whose response ends within its body."""
PAGE: Final = 1000
"""The most objects that a store lists in one response."""
_CUT: Final = re.compile("request or response body error|NoSuchUpload")
"""The error of such a response. It may have completed an upload, whose end obstore then misses."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]+)(?:/(.*))?", re.DOTALL)
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]+(/\S*)?")
_JOINED: Final = re.compile(r"(?:^|/)([A-Za-z][A-Za-z0-9+.-]+):/")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_REFUSED: Final = re.compile(
    "ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch"
    "|AccessDenied|RequestTimeTooSkewed|InvalidClientTokenId|AuthenticationFailed|invalid_grant"
    "|AuthorizationFailure|AuthorizationPermissionMismatch"
)
_STATUS: Final = re.compile(r"status code: (\d{3}[^:\n]*)")
_SERVER: Final = re.compile(r"https?://[^/\s?,]+")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]+)"|kind: (Timeout)')


@dataclass(frozen=True)
class ObjectPath:
    """The name of an object, or the beginning of names that a directory would have."""

    root: str
    """The bucket as a URL, such as `s3://bucket`."""
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, more: str) -> "ObjectPath":
        return ObjectPath(self.root, f"{self.key}/{more}".strip("/"))

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The name without its last part."""
        return ObjectPath(self.root, self.key.rpartition("/")[0])

    def absolute(self) -> "ObjectPath":
        """Returns the path itself."""
        return self

    def mkdir(self, **_: bool) -> None:
        """Does nothing: an object store has no directories."""

    def exists(self) -> bool:
        """Returns whether there is an object of this name."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def size(self) -> int:
        """Returns the bytes of an object that is not empty. Raises FileNotFoundError.

        The request is no HEAD, because its response has no body that says what is wrong.
        """
        import obstore

        get = partial(obstore.get, client(self.root), self.key, options={"range": (0, 1)})
        return _send(self, get).meta["size"]

    def is_dir(self) -> bool:
        """Returns whether there is an object below this name."""
        return any(True for _ in self.objects())

    def read_bytes(self) -> bytes:
        """Returns the content. Raises FileNotFoundError."""
        import obstore

        return _send(self, lambda: bytes(obstore.get(client(self.root), self.key).bytes()))

    def write_bytes(self, data: bytes) -> None:
        """Writes an object, in place of one that is there. Readers see the old or the new one."""
        import obstore

        put = partial(obstore.put, client(self.root), self.key, data, use_multipart=False)
        _send(self, put)

    def create(self, data: bytes) -> None:
        """Writes an object if there is none of this name. Raises FileExistsError.

        A request whose response was lost is repeated, and finds the object that it made itself. So
        the content decides who has created the object: two writers must not write the same.
        """
        import obstore

        put = partial(obstore.put, client(self.root), self.key, data, use_multipart=False)
        try:
            _send(self, partial(put, mode="create"))
        except (FileExistsError, ObjectStoreError) as error:
            try:
                there = self.read_bytes()
            except FileNotFoundError:
                # The request may still be on its way. Its files stay until another commit has
                # the same version (engine.finish).
                raise error from None
            if there != data:
                raise FileExistsError(f"{self} exists") from None

    def upload(self, file: IO[bytes]) -> None:
        """Writes the content of a local file, from its beginning. The object appears complete."""
        import obstore

        def put() -> None:
            """Sends the file from its beginning."""
            file.seek(0)
            obstore.put(client(self.root), self.key, file, chunk_size=PART_BYTES)

        _send(self, put)

    def copy_to(self, target: "ObjectPath") -> None:
        """Copies the object inside the store. Raises FileNotFoundError."""
        import obstore

        _send(self, partial(obstore.copy, client(self.root), self.key, target.key))

    def objects(self) -> "Iterator[ListedObject]":
        """Yields the objects below this name in the order of their names, as far as they go."""
        import obstore

        prefix = f"{self.key}/" if self.key else None
        last: str | None = None

        def page() -> "Sequence[ObjectMeta]":
            """Requests the objects after the last one."""
            found = obstore.list(client(self.root), prefix, offset=last, chunk_size=PAGE)
            return next(iter(found), ())

        while found := _send(self, page):
            for each in found:
                last = each["path"]
                yield ListedObject(ObjectPath(self.root, last), each["size"], each["last_modified"])
            if len(found) < PAGE:
                return

    def iterdir(self) -> "Iterator[ObjectPath]":
        """Yields the next parts of the names below this one."""
        import obstore

        prefix = f"{self.key}/" if self.key else None
        found = _send(self, lambda: obstore.list_with_delimiter(client(self.root), prefix))
        for name in [*found["common_prefixes"], *(each["path"] for each in found["objects"])]:
            yield ObjectPath(self.root, name)


LakePath = Path | ObjectPath
"""A path of a lake: in a file system or in an object store."""


@dataclass(frozen=True)
class ListedObject:
    """An object as the store lists it."""

    path: ObjectPath
    size: int
    modified: datetime

    @property
    def age_s(self) -> float:
        """The seconds since it was written, by this machine's clock."""
        return (datetime.now(UTC) - self.modified).total_seconds()


class ObjectReader(io.RawIOBase):
    """The content of an object as a file. It requests the ranges that are read."""

    def __init__(self, path: ObjectPath, size: int = 0) -> None:
        """`size`: its bytes, if they are known. Else this requests them."""
        self._path = path
        self._size = size or path.size()
        self._at = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Sets the position in bytes and returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Reads up to the size of a buffer, and returns the number of bytes."""
        import obstore

        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        store, key = client(self._path.root), self._path.key
        get = partial(obstore.get_range, store, key, start=self._at, length=length)
        try:
            data = _send(self._path, get)
        except ObjectStoreError as error:
            if "InvalidRange" not in str(error):
                raise
            return 0  # The object became shorter, and the file ends here.
        buffer[:length] = data
        self._at += length
        return length


def location(path: str | LakePath) -> LakePath:
    """Returns a path as an ObjectPath if it is a URL of an object store, else as a Path.

    Raises LakeError for a URL of another scheme, and for one without a name below the bucket.
    """
    if isinstance(path, ObjectPath):
        return path
    match = _URL.fullmatch(str(path))
    joined = _JOINED.search(str(path))
    if match is None and joined is None:
        return Path(path)
    scheme = match[1].lower() if match is not None else str(joined and joined[1])
    if match is None or scheme not in SCHEMES:
        # A Path has only one of the two slashes of a URL.
        raise LakeError(
            f"the lake {scheme}://... is no directory and in no object store. Give, as a text, the "
            "path of a directory, or s3://BUCKET/NAME, gs://BUCKET/NAME or "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME"
        )
    bucket, key = match[2], (match[3] or "").strip("/")
    if not key or "//" in key:
        raise LakeError(f"{path} names no place for a lake: give {scheme}://{bucket}/NAME")
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise LakeError(
            f"a lake in {scheme}:// needs the package obstore: pip install 'holdfast[spark]'"
        ) from None
    return ObjectPath(f"{scheme}://{bucket}", key)


def directory_of(lake: LakePath) -> Path:
    """Returns the path of a lake on a file system. Raises LakeError for one in an object store."""
    if isinstance(lake, ObjectPath):
        raise LakeError(
            f"{lake} is in an object store, which Spark's own catalog cannot list. Register it in"
            " an Iceberg catalog: `holdfast pipeline register --iceberg CATALOG`"
        )
    return lake


def at_once(place: LakePath, calls: Iterable[Callable[[], Response]]) -> Iterator[Response]:
    """Yields the results of calls in their order. Requests to an object store do not wait for each
    other, because each takes the time of a way to the store and back."""
    if isinstance(place, ObjectPath):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            yield from threads.map(lambda call: call(), calls)
    else:
        for call in calls:
            yield call()


def remove_objects(paths: Iterable[ObjectPath]) -> None:
    """Removes objects with few requests. Those that are not there are no error."""
    import obstore

    by_root: dict[str, list[ObjectPath]] = {}
    for path in paths:
        by_root.setdefault(path.root, []).append(path)
    for root, found in by_root.items():
        try:
            keys = [each.key for each in found]
            _send(found[0], partial(obstore.delete, client(root), keys))
        except FileNotFoundError:  # Azure and Google report it for any of them
            for each in found:
                try:
                    _send(each, partial(obstore.delete, client(root), each.key))
                except FileNotFoundError:
                    continue


def move_objects(moves: Sequence[tuple[ObjectPath, ObjectPath]]) -> list[ObjectPath]:
    """Copies each object to its place and then removes the sources.

    Returns the targets of which neither is there. Several processes may do the same moves.
    """

    def move(pair: tuple[ObjectPath, ObjectPath]) -> bool:
        """Copies one object. Returns False if neither name is there."""
        source, target = pair
        try:
            source.copy_to(target)
        except FileNotFoundError:
            return target.exists()
        return True

    with ThreadPoolExecutor(AT_ONCE) as threads:
        there = list(threads.map(move, moves))
    remove_objects(source for source, _ in moves)
    return [target for (_, target), found in zip(moves, there, strict=True) if not found]


def has_plain_http() -> bool:
    """Returns whether the environment names an endpoint without TLS. Raises LakeError for one that
    is no URL, of which obstore's Rust code would panic."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ENDPOINT")
    found = {name: os.environ[name] for name in names if name in os.environ}
    for name, value in found.items():
        if not _ENDPOINT.fullmatch(value):
            raise LakeError(
                f"the variable {name}={value} is no URL such as https://HOST:PORT: correct it, or "
                "unset it"
            )
    return any(value.startswith("http://") for value in found.values())


_has_short_retries = False


def shorten_retries() -> None:
    """Lets this process report an unavailable store after SHORT_RETRY_S."""
    global _has_short_retries
    _has_short_retries = True
    client.cache_clear()


@lru_cache(maxsize=16)
def client(root: str) -> "ObjectStore":
    """Returns the client of a bucket, with the credentials and the endpoint of the environment."""
    from obstore.store import from_url

    more: dict[str, Any] = {}
    if root.startswith("s3:") and "AWS_PROFILE" in os.environ:
        from obstore.auth.boto3 import Boto3CredentialProvider

        more["credential_provider"] = Boto3CredentialProvider()
    if "AWS_ENDPOINT_URL_S3" in os.environ and root.startswith("s3:"):
        more["endpoint"] = os.environ["AWS_ENDPOINT_URL_S3"]
    return from_url(
        root,
        client_options={
            "allow_http": has_plain_http(),
            "timeout": timedelta(seconds=REQUEST_S),
        },
        retry_config={
            "max_retries": SHORT_RETRIES_MAX if _has_short_retries else RETRIES_MAX,
            "retry_timeout": timedelta(seconds=SHORT_RETRY_S if _has_short_retries else RETRY_S),
            "backoff": {"max_backoff": timedelta(seconds=BACKOFF_MAX_S)},
        },
        **more,
    )


def _send(path: ObjectPath, request: Callable[[], Response]) -> Response:
    """Sends a request, and again if its response ends within its body. obstore does so for the
    content of an object only, not for listings, copies, uploads and errors."""
    from obstore import exceptions

    for left in reversed(range(CUT_MAX)):
        with _errors(path):
            try:
                return request()
            except (exceptions.BaseError, FileNotFoundError) as error:
                if not left or not _CUT.search(str(error)):
                    raise
    raise AssertionError


@contextmanager
def _errors(path: ObjectPath) -> Iterator[None]:
    """Turns the errors of a store into those of files, with a text of one line."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise FileExistsError(f"{path} exists") from None
    except (exceptions.BaseError, FileNotFoundError) as error:
        # Of a bucket that is not there, a listing raises neither of the errors of objects.
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            raise LakeError(f"there is no bucket {path.root}: make it first") from None
        if isinstance(error, exceptions.NotFoundError | FileNotFoundError):
            raise FileNotFoundError(f"{path} is missing") from None
        raise _told(path, str(error), error) from None


def _told(path: ObjectPath, text: str, error: Exception) -> Exception:
    from obstore import exceptions

    code, status = _CODE.search(text), _STATUS.search(text)
    refused = _REFUSED.search(text)
    found = [each[1].strip() for each in (status, code) if each]
    if not found:
        # Without the times of this attempt: a cause that lasts always has the same text.
        server, cause = _SERVER.search(text), _CAUSE.findall(text)
        found = [server[0]] if server else []
        found += [error_text or kind for error_text, kind in cause[-1:]]
    why = ", ".join(found) or text.splitlines()[0][:200]
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if refused or isinstance(error, denied):
        return CredentialsError(
            f"the object store refuses the credentials for {path} "
            f"({refused[0] if refused else why}). Renew them and run again: nothing is lost"
        )
    return ObjectStoreError(f"the object store does not serve {path}: {why}")


PROBES: Final = "_probe"
WRITERS: Final = 8
ROUNDS: Final = 4
LEFT_S: Final = 3600.0
"""The age in seconds from which the objects of a killed probe are removed."""


def check_object_store(lake: ObjectPath) -> None:
    """Checks the store of a lake. Raises LakeError for one that cannot keep a lake."""
    place = lake / PROBES / secrets.token_hex(8)
    try:
        with ThreadPoolExecutor(WRITERS) as writers:
            for number in range(ROUNDS):
                _check_race(place / str(number), writers)
        listed = sorted(each.path.name for each in place.objects())
        if listed != [str(number) for number in range(ROUNDS)]:
            raise LakeError(
                f"the object store of {lake} does not list what was just written: a lake needs a "
                "store that is consistent"
            )
    finally:
        remove_objects(each.path for each in place.objects())
    left = [each.path for each in (lake / PROBES).objects() if each.age_s > LEFT_S]
    if left:
        remove_objects(left)


def _check_race(path: ObjectPath, writers: ThreadPoolExecutor) -> None:
    contents = [f"{secrets.token_hex(8)} {number}".encode() for number in range(WRITERS)]

    def create(content: bytes) -> bool:
        try:
            path.create(content)
        except FileExistsError:
            return False
        except ObjectStoreError as error:
            if "501" in str(error) or "NotImplemented" in str(error):
                raise _refusal(path, "refuses If-None-Match") from None
            raise
        return True

    won = [
        content for content, has in zip(contents, writers.map(create, contents), strict=True) if has
    ]
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        there = b""
    if there not in won:
        raise LakeError(
            f"the object store of {path.root} has forgotten or changed an object that it had "
            "acknowledged: it cannot keep a lake"
        )
    if len(won) != 1:
        raise _refusal(path, f"let {len(won)} of {WRITERS} writers create the same object")


def _refusal(path: ObjectPath, why: str) -> LakeError:
    return LakeError(
        f"the object store of {path.root} {why}. A lake needs a store that creates an object "
        "only if there is none (If-None-Match: *), as AWS S3, MinIO, Ceph, Google and Azure do"
    )
