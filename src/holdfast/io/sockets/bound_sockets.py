"""Binds sockets to listen on: TCP addresses, and Unix sockets, whose path is left behind when a
process dies."""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

INHERITED: Final[dict[str, int]] = {}
"""The Unix sockets that this process shares with others, because the one that started them has
bound them: descriptors by path."""


def reserve_tcp(bind: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Binds all addresses of a host; connections are refused until `listen`. Port 0: one that the
    system chooses, the same for all. `is_shared`: other processes bind them, too, and the system
    divides the connections.

    Raises `OSError` if an address cannot be used.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            bind.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setblocking(False)
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise OSError(error.errno, f"{bind}:{port}: {error.strerror or error}") from error
    return sockets


def reserve_unix(path: Path, mode: int) -> socket.socket:
    """Binds a Unix socket; connections are refused until `listen`.

    A socket at the path on which no process listens is replaced. Raises `OSError` for one in use,
    and for any other file.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    # A name of its own first: nobody can connect before the mode is set, and there is always a
    # socket at the path when one process takes over from another.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _check_free(path)
        temporary.unlink(missing_ok=True)
        made.bind(str(temporary))
        temporary.chmod(mode)
        temporary.rename(path)
    except OSError as error:
        made.close()
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{path}: {error.strerror or error}") from error
    return made


def identity(path: Path) -> tuple[int, int]:
    """The device and inode of the file at a path, or zeros."""
    try:
        found = path.lstat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def set_mode(path: Path, mode: int) -> None:
    """Changes who may connect. Raises `OSError`."""
    path.chmod(mode)


def remove_unix(path: Path, own: tuple[int, int]) -> None:
    """Removes the path of a socket, unless another process has put its own there."""
    if identity(path) == own:
        with suppress(OSError):
            path.unlink()


def _check_free(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            # Its queue of connections is full, so it is in use.
            pass
    raise OSError(errno.EADDRINUSE, "another process listens there")
