"""Hosts on several continents: namespaces of the kernel, with a delay between each two of them.

Each host is a network namespace with one TUN device. A thread of this process is the router: it
reads the packets of all devices and writes each one to its destination when its delay is over. The
kernel's own emulation of delays (netem) is not used, because not every kernel has it.
"""

import fcntl
import heapq
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from holdfast_lab.targets.namespaces import Namespace
from holdfast_lab.targets.namespaces import missing as missing_namespaces

DEVICE: Final = "/dev/net/tun"
TUNSETIFF: Final = 0x400454CA
IFF_TUN_NO_PI: Final = 0x1001
PREFIX: Final = "10.78"
"""The first half of the addresses. They are not seen outside of the namespaces."""
PACKET_BYTES: Final = 65_536
WAITING_MAX: Final = 100_000
"""The most packets under way. A router with a full buffer drops what comes then, and so does this
one."""


def missing() -> str:
    """Returns why there can be no such network here, or "" when there can."""
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"no access to {DEVICE}"
    return missing_namespaces()


class WideHost(Namespace):
    """A host with one address. `device` is the router's end of its link."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.name = name
        self.number = number
        self.address = f"{PREFIX}.{number}.2"
        with self.entered():
            # A TUN device belongs to the namespace in which its file was opened.
            self.device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self.device, TUNSETIFF, struct.pack("16sH14x", b"eth0", IFF_TUN_NO_PI))
        self.run("ip", "address", "add", f"{self.address}/16", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def close(self) -> None:
        """Ends the host."""
        os.close(self.device)
        super().close()


class WideNetwork:
    """Hosts and the router between them: `with WideNetwork(names, delay_s) as network`.

    `delay_s` is the time in seconds from one host to another, one way.
    """

    def __init__(self, names: Sequence[str], delay_s: Callable[[str, str], float]) -> None:
        self.hosts: dict[str, WideHost] = {}
        self._delay_s = delay_s
        self._lost: set[tuple[int, int]] = set()
        self._ended = threading.Event()
        try:
            for number, name in enumerate(names, 1):
                self.hosts[name] = WideHost(name, number)
        except BaseException:
            self._close_hosts()
            raise
        self._router = threading.Thread(target=self._route, name="router", daemon=True)
        self._router.start()

    def __enter__(self) -> "WideNetwork":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the router and all hosts."""
        self._ended.set()
        self._router.join()
        self._close_hosts()

    def _close_hosts(self) -> None:
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()

    def isolate(self, names: Sequence[str]) -> None:
        """Loses everything between these hosts and all others, in both directions."""
        inside = {self.hosts[name].number for name in names}
        outside = {host.number for host in self.hosts.values()} - inside
        pairs = {(one, other) for one in inside for other in outside}
        self._lost = pairs | {(other, one) for one, other in pairs}

    def heal(self) -> None:
        """Lets everything pass again."""
        self._lost = set()

    def _route(self) -> None:
        hosts = {host.number: host for host in self.hosts.values()}
        delays = {
            (one, other): self._delay_s(hosts[one].name, hosts[other].name)
            for one in hosts
            for other in hosts
        }
        sources = {host.device: host.number for host in hosts.values()}
        devices = {host.number: host.device for host in hosts.values()}
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        poll = select.epoll()
        for device in sources:
            poll.register(device, select.EPOLLIN)
        with poll:
            while not self._ended.is_set():
                pause_s = waiting[0][0] - time.monotonic() if waiting else 0.1
                for device, _ in poll.poll(min(max(pause_s, 0.0), 0.1)):
                    for packet in _packets(device):
                        # The third byte of the destination is the host's number.
                        way = (sources[device], packet[18])
                        if way in delays and way not in self._lost and len(waiting) < WAITING_MAX:
                            count += 1
                            due_s = time.monotonic() + delays[way]
                            heapq.heappush(waiting, (due_s, count, devices[way[1]], packet))
                now_s = time.monotonic()
                while waiting and waiting[0][0] <= now_s:
                    _, _, device, packet = heapq.heappop(waiting)
                    _write(device, packet)


def _packets(device: int) -> list[bytes]:
    """Returns the IPv4 packets that a device has now."""
    found: list[bytes] = []
    try:
        while len(found) < 64:
            packet = os.read(device, PACKET_BYTES)
            if len(packet) >= 20 and packet[0] >> 4 == 4:
                found.append(packet)
    except BlockingIOError:
        pass
    return found


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        # A link that has no room, or that goes down, loses packets; TCP sends them again.
        return
