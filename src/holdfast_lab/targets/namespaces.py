"""Hosts with a network of their own, as namespaces of the kernel; needs root and iproute2.

Every host has a link to a router in the middle, which can lose what goes from one host to
another, silently and one way: the hosts see nothing but silence.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

CLONE_NEWNET: Final = 0x40000000
PREFIX: Final = "10.77"
"""The first half of the addresses. They are not seen outside of the namespaces."""
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Returns why there can be no namespaces here, or "" when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no network namespace: {done.stderr.strip()}"


class Namespace:
    """A network namespace. It lives as long as its holder, a process that ends with this one."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            # The echo says that the namespace is made; then it waits for the end of its input.
            ["unshare", "--net", "sh", "-c", "echo made; cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"made\n":
            raise OSError("no network namespace")
        self.pid = self._holder.pid
        self._handle = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        self.run("ip", "link", "set", "lo", "up")

    def close(self) -> None:
        """Ends the namespace."""
        os.close(self._handle)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()

    def command(self, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command inside.

        The command runs in the process that is started, without another one between. It is killed
        when the thread that started it ends.
        """
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        return [*inside, "setpriv", "--pdeathsig", "KILL", "--", *command]

    def run(self, *command: str) -> None:
        """Runs a command inside. Raises OSError with its error text."""
        done = subprocess.run(self.command(command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Moves the calling thread inside. A socket stays in the namespace in which it was made."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _setns(self._handle)
            try:
                yield
            finally:
                _setns(before)
        finally:
            os.close(before)

    def make_socket(self) -> socket.socket:
        """Returns a TCP socket of this namespace."""
        with self.entered():
            return socket.socket()


def _setns(handle: int) -> None:
    if _libc.setns(handle, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Host(Namespace):
    """A namespace with one link, to the router."""

    def __init__(self, name: str, number: int, router: Namespace) -> None:
        super().__init__()
        self.name = name
        self.number = number
        self.address = f"{PREFIX}.{number}.2"
        self.link = f"to{number}"
        """The router's end of the link."""
        near = f"{PREFIX}.{number}.1"
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self.pid)]
        router.run("ip", "link", "add", self.link, *peer)
        router.run("ip", "address", "add", f"{near}/24", "dev", self.link)
        router.run("ip", "link", "set", self.link, "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", near)


class Network:
    """Hosts and their router: `with Network(["n1", "n2", "clients"]) as network`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._router = Namespace()
        self._cut: set[tuple[str, str]] = set()
        self.hosts: dict[str, Host] = {}
        try:
            self._router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, name in enumerate(names, 1):
                self.hosts[name] = Host(name, number, self._router)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all namespaces."""
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()
        self._router.close()

    def _rule(self, order: str, source: str, target: str) -> None:
        link, address = self.hosts[source].link, self.hosts[target].address
        self._router.run("ip", "rule", order, "iif", link, "to", address, "blackhole")

    def cut(self, source: str, target: str) -> None:
        """Loses everything that `source` sends to `target` from now on."""
        if (source, target) not in self._cut:
            self._rule("add", source, target)
            self._cut.add((source, target))

    def part(self, ones: Sequence[str], others: Sequence[str]) -> None:
        """Loses everything between the ones and the others, in both directions."""
        for one in ones:
            for other in others:
                if one != other:
                    self.cut(one, other)
                    self.cut(other, one)

    def heal(self) -> None:
        """Lets everything pass again."""
        for source, target in sorted(self._cut):
            self._rule("delete", source, target)
        self._cut.clear()
