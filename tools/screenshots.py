"""The pictures of docs/images: `make screenshots`.

Starts the cluster of the demo with its traffic, kills the leader of a busy partition with SIGKILL,
and takes pictures of the console's screens; then the same with a federation of five brokers. Needs
Chromium and Playwright.

    python tools/screenshots.py [DIR]
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from console_pictures import Camera, Picture, Unavailable, camera  # noqa: E402
from demo import Cluster, Demo, client  # noqa: E402

from holdfast.client.blocking import Client  # noqa: E402
from tests.e2e.federated import Member, running  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
WIDE: Final = 620
"""Pixels of height of screens that have little below."""
CLUSTER: Final = (
    Picture("timeline", "timeline?seconds=15", ".story li:nth-child(4)", height=1000),
    Picture("timeline-dark", "timeline?seconds=15", ".story li:nth-child(4)", "dark", 1000),
    Picture("overview", "", ".health", height=WIDE + 80),
    Picture("cluster", "cluster", ".seat.leader", height=760),
    Picture("cluster-dark", "cluster", ".seat.leader", "dark", 760),
    Picture("log", "log?filter=telemetry/%23", "tbody tr", height=WIDE),
    Picture("sessions", "sessions", "tbody tr", height=760, selected="tbody tr:has-text('slow')"),
)
FEDERATION: Final = Picture("federation", "federation?topic=plant/line-1", ".web circle")
NAMES: Final = ("berlin", "lyon", "madrid", "oslo", "turin")
LINKS: Final = ((0, 1), (1, 2), (1, 4), (0, 3), (0, 4), (2, 4))
WAIT_S: Final = 60.0


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
        take(camera, demo.survivors()[0].admin, cluster.token, CLUSTER, images)
        for device in demo.devices:
            device.stop()
        demo.subscriber.go_away()
    finally:
        cluster.stop()


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
            take(camera, f"127.0.0.1:{members[0].admin_port}", "", (FEDERATION,), images)


def take(
    camera: Camera, admin: str, token: str, pictures: tuple[Picture, ...], images: Path
) -> None:
    for file in camera.take(admin, token, pictures, images):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of the console.")
    parser.add_argument("images", nargs="?", type=Path, default=IMAGES, metavar="DIR")
    images: Path = parser.parse_args().images
    try:
        with camera() as one, tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as found:
            of_a_cluster(one, Path(found), images)
            of_a_federation(one, Path(found), images)
    except Unavailable as missing:
        print(f"screenshots: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
