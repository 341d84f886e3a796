"""Every screen for everybody: axe-core (npm) finds nothing serious in light and dark, a window of
400 pixels is wide enough, and the keyboard is enough."""

import itertools
import math
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from tests.browser.pages import ConsolePage
from tests.browser.test_console_pipeline import report
from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.federated import Member, running
from tests.e2e.wire import Wire
from tests.support.api_client import Api

pytestmark = pytest.mark.long
AXE: Final = "axe-core@4"
NPM_S: Final = 120
SERIOUS: Final = ("serious", "critical")
NARROW: Final = 400
SCREENS: Final = (
    "", "log", "log?at=0/0", "topics", "topics?at=plant/1", "sessions", "sessions?client=away",
    "trace?topic=plant/1&client=away", "cluster", "timeline?seconds=30", "drops", "client",
    "access",
    "access?client=away&topic=plant/1", "pipeline?table=readings", "bans", "settings?all=on",
    "audit",
)  # fmt: skip


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, as npm has it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"no npm: {AXE} cannot be had")
    directory = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=directory, capture_output=True, text=True,
        timeout=NPM_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"npm does not have {AXE} here: {done.stderr.strip()[-200:]}")
    with tarfile.open(directory / done.stdout.split()[-1]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 4}}) as cluster:
        yield cluster


def findings(page: Page, axe: str) -> list[str]:
    """The serious findings about the page as it is."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['target']}: {node['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"][:3]
    ]


def complaints_of(page: Page, axe: str, screen: str) -> list[str]:
    """The serious findings about a screen in light, dark and narrow."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)
    found: list[str] = []
    for scheme, width in (("light", 1280), ("dark", 1280), ("dark", NARROW)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found += [f"#/{screen} {scheme} {width}: {each}" for each in findings(page, axe)]
    if page.evaluate("document.documentElement.scrollWidth") > NARROW:
        found.append(f"#/{screen}: wider than {NARROW} pixels")
    return found


def test_every_screen_is_for_everybody(
    cluster: ClusterProcesses, page: ConsolePage, axe: str
) -> None:
    node = cluster.nodes["n1"]
    with Wire(node.port) as client:
        client.connect("away", expiry_s=1000)
        client.subscribe(("plant/#", 1))
    with Wire(node.port) as client:
        client.connect("pump")
        for number in range(20):
            client.publish(f"plant/{number % 5}", b'{"n": %d}' % number, qos=1, retain=True)
        client.publish("plant/<b>/" + "long" * 40, b"\xff\xe2\x80\xae" * 40, qos=1)
        Api(node.admin_port).post("pipeline", report(), name="plant")
        found: list[str] = []
        for screen in SCREENS:
            page.open(node.admin_port, f"#/{screen}")
            found += complaints_of(page.page, axe, screen)
    assert found == []


def test_the_federation_is_for_everybody(tmp_path: Path, page: ConsolePage, axe: str) -> None:
    members = [Member(tmp_path, name) for name in ("berlin", "lyon")]
    members[1].link_to(members[0])
    with running(members):
        page.open(members[0].admin_port, "#/federation?topic=plant/1")
        expect(page.page.locator(".member")).to_have_count(2)
        assert complaints_of(page.page, axe, "federation") == []
        check_places(page.page)


def check_places(page: Page) -> None:
    """The same graph has the same places, in the box and apart from each other."""
    for size in (0, 1, 2, 5, 40):
        ids = [f"member-{number}" for number in range(size)]
        links = [[ids[number], ids[number // 2]] for number in range(1, size)]
        first, again = (
            page.evaluate(
                """async ([ids, links]) => {
                  const { place } = await import("/console/parts/layout.js");
                  const found = place(ids, links, 760, 420, [70, 46]);
                  return [...found.values()].map((one) => [one.x, one.y]);
                }""",
                [ids, links],
            )
            for _ in range(2)
        )
        assert first == again
        assert len(first) == size
        assert all(70 <= x <= 690 and 46 <= y <= 374 for x, y in first)
        pairs = itertools.combinations(first, 2)
        assert min((math.dist(one, other) for one, other in pairs), default=99) > 20


def test_the_keyboard_is_enough(cluster: ClusterProcesses, page: ConsolePage) -> None:
    node, view = cluster.nodes["n1"], page.page
    with Wire(node.port) as client:
        client.connect("a-first")
        page.open(node.admin_port, "#/sessions")
        rows = view.locator("tbody tr")
        expect(rows.filter(has_text="a-first")).to_be_visible()
        view.keyboard.press("/")
        expect(view.get_by_label("Client, user or address")).to_be_focused()
        view.keyboard.type("a-first")
        view.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        rows.first.focus()
        view.keyboard.press("Enter")
        drawer = view.get_by_role("complementary")
        expect(drawer).to_contain_text("Position in each partition")
        view.keyboard.press("Escape")
        expect(drawer).to_have_count(0)
        expect(rows.first).to_be_focused()
        view.keyboard.press("Enter")
        drawer.get_by_role("button", name="Disconnect").press("Enter")
        expect(view.get_by_role("dialog")).to_be_visible()
        view.keyboard.press("Escape")
        expect(view.get_by_role("dialog")).to_have_count(0)
        expect(rows.filter(has_text="connected")).to_have_count(1)
