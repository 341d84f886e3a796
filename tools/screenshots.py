"""The pictures of docs/images: `make screenshots`.

Starts the cluster of the demo with its traffic, kills the leader of a busy partition with SIGKILL,
and takes pictures of the console's screens, each in light and dark; then the same with one broker
for the screens of administration, and with a federation of five. Needs Chromium and Playwright;
with Pillow the files are a third as large.

    python tools/screenshots.py [DIR]
"""

import argparse
import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from console_pictures import Camera, Picture, Unavailable, camera  # noqa: E402
from demo import Cluster, Demo, client  # noqa: E402

from holdfast.client.blocking import Client  # noqa: E402
from tests.e2e.federated import Member, running  # noqa: E402
from tests.e2e.listeners_broker import ListenersBroker  # noqa: E402
from tests.e2e.test_admin_access import ask, made_token  # noqa: E402
from tests.e2e.wire import DISCONNECT, Closed, Wire  # noqa: E402
from tests.support.ports import free_port  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
SHORT: Final = 700
"""Pixels of height of screens that have little below."""
CLUSTER: Final = (
    Picture("timeline", "timeline?seconds=15", ".story li:nth-child(4)", height=1000),
    Picture("overview", "", ".health:not(:has-text('Loading'))", height=900, settle_ms=10_000),
    Picture("cluster", "cluster", ".seat.leader", height=760),
    Picture("log", "log?filter=telemetry/%23", "tbody tr", selected="tbody tr:nth-child(2)"),
    Picture(
        "topics",
        'topics?open=["telemetry","telemetry/memory"]',
        ".tree .value",
        height=SHORT,
        selected=".tree ul ul ul a >> nth=1",
    ),
    Picture("sessions", "sessions", "tbody tr", selected="tbody tr:has-text('slow')", height=900),
    Picture("trace", "trace?topic=TOPIC&client=slow-archive", "tbody tr", height=SHORT),
    Picture("drops", "drops", "tbody tr", height=900),
)
PIPELINE: Final = (Picture("pipeline", "pipeline", ".graph .box", height=900),)
BROKER: Final = (
    Picture("access", "access?client=meter-17&topic=plant/1", ".sentence", height=SHORT),
    Picture("bans", "bans", "tbody tr", height=SHORT),
    Picture("settings", "settings", "tbody tr", height=SHORT),
    Picture("audit", "audit", "tbody tr", selected="tbody tr:has-text('address=')", height=SHORT),
    Picture("client", "client", "form, .card", height=SHORT, selected="button:has-text('Connect')"),
)
FEDERATION: Final = (Picture("federation", "federation?topic=plant/line-1", ".web circle"),)
NAMES: Final = ("berlin", "lyon", "madrid", "oslo", "turin")
LINKS: Final = ((0, 1), (1, 2), (1, 4), (0, 3), (0, 4), (2, 4))
WAIT_S: Final = 60.0
PIPELINE_S: Final = 400.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.1)


def of_a_cluster(camera: Camera, directory: Path, images: Path) -> None:
    """With a session that is behind, because its client went away."""
    cluster = Cluster(directory)
    try:
        cluster.start()
        demo = Demo(cluster, 0.0)
        slow = client("slow-archive", cluster.nodes)
        slow.connect()
        slow.subscribe(("telemetry/#", 1))
        demo.subscriber.start(cluster.nodes)
        for device in demo.devices:
            device.start()
        until(lambda: len(demo.acknowledged()) > 100, "traffic")
        slow.disconnect()
        slow.close()
        published = len(demo.acknowledged())
        until(lambda: len(demo.acknowledged()) > published + 1500, "traffic before the kill")
        demo.kill_a_leader()
        published = len(demo.acknowledged())
        until(lambda: len(demo.acknowledged()) > published + 600, "traffic after the kill")
        refused(demo.survivors()[0].port)
        topic = quote(next(name for name, _ in demo.acknowledged() if "memory" in name), safe="")
        pictures = (
            dataclasses.replace(each, screen=each.screen.replace("TOPIC", topic))
            for each in CLUSTER
        )
        admin = demo.survivors()[0].admin
        take(camera, admin, cluster.token, pictures, images)
        run_pipeline(admin, directory / "lake")
        take(camera, admin, cluster.token, PIPELINE, images)
        for device in demo.devices:
            device.stop()
        demo.subscriber.go_away()
    finally:
        cluster.stop()


def run_pipeline(admin: str, lake: Path) -> None:
    """Make the tables of the log with Spark. The run reports them to the broker."""
    command = [sys.executable, "-m", "holdfast.cli.main", "pipeline", "run", "all"]
    command += ["--from", admin, "--lake", str(lake)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIPELINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"the pipeline has failed:\n{done.stderr[-2000:]}")


def refused(port: int) -> None:
    """Send packets that break the protocol, for the screen of drops."""
    for number in range(3):
        with Wire(port) as client:
            client.connect(f"broken-{number}")
            client.send(b"\x00\x00")
            with contextlib.suppress(Closed):
                client.expect(DISCONNECT)


@contextlib.contextmanager
def subscribers(members: list[Member], topic: str) -> Iterator[None]:
    with contextlib.ExitStack() as clients:
        for member in members:
            found = Client("127.0.0.1", member.port, client_id=f"screen-{member.name}")
            clients.callback(found.close)
            found.connect()
            found.subscribe((topic, 1))
        yield


def of_a_federation(camera: Camera, directory: Path, images: Path) -> None:
    """With a topic that three of five members want."""
    members = [Member(directory, name) for name in NAMES]
    for at, member in enumerate(members):
        member.link_to(*(members[one] for one, other in LINKS if other == at))
    with running(members):
        until(
            lambda: all(each.federation().get("members") == len(NAMES) for each in members),
            "the members know each other",
        )
        wanting = [members[0], members[2], members[4]]
        with subscribers(wanting, "plant/line-1"):
            members[0].await_interest("plant/line-1", len(wanting))
            take(camera, f"127.0.0.1:{members[0].admin_port}", "", FEDERATION, images)


def of_a_broker(camera: Camera, directory: Path, images: Path) -> None:
    """With users and tokens, a ban, and a WebSocket listener."""
    broker = ListenersBroker(directory, [{"port": free_port(), "transport": "websocket"}])
    broker.start()
    try:
        token = made_token(broker.data, "admin")
        admin = f"127.0.0.1:{broker.admin_port}"
        until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401, "the token")
        for path, body in (
            ("users", {"name": "ada", "password": "a long password", "role": "operator"}),
            ("users", {"name": "grace", "password": "a long password", "role": "admin"}),
            ("tokens", {"role": "reader", "note": "Spark", "valid_s": 90 * 86400}),
            ("ban", {"address": "192.0.2.0/24", "duration_s": 86400, "reason": "scans ports"}),
            ("ban", {"client": "meter-17", "reason": "repeats its messages"}),
        ):
            done = ask(broker.admin_port, "POST", f"/api/v1/{path}", token, body)
            if done.status != 200:
                raise SystemExit(f"{path}: {done.status}")
        take(camera, admin, token, BROKER, images)
    finally:
        broker.stop()


def both(pictures: Iterable[Picture]) -> Iterator[Picture]:
    """Each picture in light, and in dark with a name that says so."""
    for each in pictures:
        yield each
        yield dataclasses.replace(each, name=f"{each.name}-dark", scheme="dark")


def take(camera: Camera, admin: str, token: str, pictures: Iterable[Picture], images: Path) -> None:
    for file in camera.take(admin, token, both(pictures), images):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of the console.")
    parser.add_argument("images", nargs="?", type=Path, default=IMAGES, metavar="DIR")
    images: Path = parser.parse_args().images
    try:
        with camera() as one, tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as found:
            of_a_cluster(one, Path(found), images)
            of_a_broker(one, Path(found) / "broker", images)
            of_a_federation(one, Path(found), images)
    except Unavailable as missing:
        print(f"screenshots: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
