"""The figures of docs/sizing.md: bytes of the log for a message, memory of an idle connection.

Run `python -m bench.sizing`. It takes about a minute, and starts brokers of its own.
"""

import argparse
import asyncio
import os
import socket
import ssl
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

import trustme

from bench import wire
from bench.process import raise_open_files_limit, rss_bytes
from holdfast.client import Message, Options
from holdfast.client.client import Client
from holdfast_lab.targets.holdfast import ClusterTarget, HoldfastNode, SingleTarget
from holdfast_lab.targets.target import Target, wait_until

MESSAGES: Final = 2000
WINDOW: Final = 16
"""The publishes that wait for their acknowledgement at a time."""
PAYLOAD: Final = bytes(64)
TOPIC: Final = "plant/line-1/machine-7"
FIRST: Final = 200
"""Connections before memory is counted: they pay for pools and tables that are made once."""
CONNECTIONS: Final = 2000
SETTLE_S: Final = 1.0


def log_bytes(node: HoldfastNode) -> float:
    """The size of the log of a node."""
    url = f"http://127.0.0.1:{node.admin_port}/metrics"
    with urllib.request.urlopen(url) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("holdfast_log_bytes"):
                return float(line.split()[1])
    raise RuntimeError("no holdfast_log_bytes")


async def settled_bytes(target: SingleTarget | ClusterTarget) -> float:
    """The size of the log at the first node once it grows no more."""
    before = -1.0
    while (size := log_bytes(target.nodes[0])) != before:
        before = size
        await asyncio.sleep(SETTLE_S)
    return size


async def message_bytes(target: SingleTarget | ClusterTarget, subscribers: int, qos: int) -> float:
    """The bytes of the log of one node for each message to durable subscribers."""
    servers = target.servers
    left = subscribers * (MESSAGES // WINDOW * WINDOW)
    all_received = asyncio.Event()

    def count(message: Message) -> None:
        nonlocal left
        left -= 1
        if not left:
            all_received.set()

    if not subscribers:
        all_received.set()
    clients = []
    for index in range(subscribers):
        options = Options(client_id=f"s{index}", clean_start=False, session_expiry_s=600)
        client = Client(
            servers=[servers[index % len(servers)]],
            options=options,
            on_message=count,
        )
        await client.connect()
        await client.subscribe((TOPIC, qos))
        clients.append(client)
    async with Client(servers=servers[:1], client_id="publisher") as publisher:
        before = await settled_bytes(target)
        for _ in range(MESSAGES // WINDOW):
            results = await asyncio.gather(
                *(publisher.publish(TOPIC, PAYLOAD, qos=max(1, qos)) for _ in range(WINDOW))
            )
            assert all(each.reason < 0x80 for each in results)
        await all_received.wait()
        grown = await settled_bytes(target) - before
    for client in clients:
        await client.disconnect()
    return grown / (MESSAGES // WINDOW * WINDOW)


def connection_bytes(directory: Path, *, is_tls: bool) -> float:
    """The memory of one idle connection, by MQTT 3.1.1 with a clean session."""
    options = []
    context = None
    if is_tls:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        names = [directory / name for name in ("server.pem", "server.key")]
        issued.cert_chain_pems[0].write_to_path(names[0])
        issued.private_key_pem.write_to_path(names[1])
        context = ssl.create_default_context()
        authority.configure_trust(context)
        config = directory / "holdfast.toml"
        config.write_text(f'[[listeners]]\ncertificate = "{names[0]}"\nkey = "{names[1]}"\n')
        options = ["-c", str(config)]
    node = HoldfastNode("n1", directory, directory / "data", *options)
    node.start()
    try:
        wait_until(node.is_listening, [node], "it listens")
        clients: list[socket.socket] = []
        sizes = []
        for count in (FIRST, CONNECTIONS):
            while len(clients) < count:
                client = socket.create_connection(("127.0.0.1", node.port))
                if context is not None:
                    client = context.wrap_socket(client, server_hostname="127.0.0.1")
                client.sendall(wire.connect(f"idle-{len(clients)}", 600))
                assert client.recv(4) == wire.CONNACK_ACCEPTED
                clients.append(client)
            time.sleep(SETTLE_S)
            sizes.append(rss_bytes(node.pid))
        for client in clients:
            client.close()
    finally:
        node.stop()
    return (sizes[1] - sizes[0]) / (CONNECTIONS - FIRST)


def measure(target: Target, title: str) -> None:
    """Print the bytes of a message for some numbers of subscribers and QoS."""
    assert isinstance(target, SingleTarget | ClusterTarget)
    target.start()
    try:
        print(f"{title}: {target.version()}", flush=True)
        for subscribers, qos in ((0, 0), (1, 1), (5, 1), (1, 2), (5, 2)):
            size = asyncio.run(message_bytes(target, subscribers, qos))
            print(f"  {subscribers} durable subscribers of QoS {qos}: {size:.0f} B", flush=True)
    finally:
        target.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["log", "memory"], help="only this part")
    only = parser.parse_args().only
    raise_open_files_limit(CONNECTIONS + 200)
    os.environ["HOLDFAST_SYS__INTERVAL_S"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name in ("single", "cluster", "tcp", "tls"):
            (directory / name).mkdir()
        if only != "memory":
            measure(SingleTarget(directory / "single"), "bytes of the log a message, one broker")
            measure(ClusterTarget(directory / "cluster"), "the same at each node of three")
        if only != "log":
            for is_tls in (False, True):
                name = "tls" if is_tls else "tcp"
                size = connection_bytes(directory / name, is_tls=is_tls)
                print(f"memory of an idle {name} connection: {size:.0f} B", flush=True)


if __name__ == "__main__":
    main()
