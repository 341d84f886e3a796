"""The screens of a cluster in a browser: a kill -9 on the timeline, a drain, roles."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.browser.publishers import Publishers
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_admin_access import ask, made_token

pytestmark = pytest.mark.long
STORY_MS = 60_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 8}}) as cluster:
        yield cluster


def test_a_node_that_does_not_know_the_users_yet_says_so(tmp_path: Path, page: ConsolePage) -> None:
    """A login would be refused there. The page goes on by itself once the node knows them."""
    cluster, view = ClusterProcesses(tmp_path), page.page
    node = cluster.nodes["n1"]
    try:
        node.start()
        with view.expect_response("**/api/v1/login") as found:
            page.open(node.admin_port, "#/cluster")
        assert found.value.status == 503
        expect(view.get_by_text("this node does not know the users and tokens")).to_be_visible()
        expect(view.get_by_role("button", name="Log in")).to_have_count(0)
        assert node.admin("/cluster/init", "POST")[0] == 200
        expect(view.get_by_role("heading", name="Cluster", level=1)).to_be_visible()
        expect(view.get_by_text("live", exact=True)).to_be_visible()
    finally:
        cluster.end()


def test_a_broker_of_another_machine_without_users_says_so(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    """Serve as through a proxy. Once there is a user, the page asks for a login."""
    broker, view = start_holdfast(), page.page
    page.context.set_extra_http_headers({"X-Forwarded-For": "192.0.2.1"})
    page.open(broker.admin_port)
    expect(view.get_by_text("processes of its own machine only")).to_be_visible()
    expect(view.get_by_role("button", name="Log in")).to_have_count(0)
    made_token(broker.data, "viewer")
    expect(view.get_by_role("button", name="Log in")).to_be_visible()


def test_a_kill_is_seen_on_the_timeline_while_it_happens(
    cluster: ClusterProcesses, page: ConsolePage
) -> None:
    victim = cluster.leader_of(0)
    watched = next(name for name in cluster.nodes if name != victim)
    with Publishers(cluster.addresses):
        page.open(cluster.nodes[watched].admin_port, "#/timeline?seconds=60")
        expect(page.page.get_by_text("No node was lost in this time.")).to_be_visible()
        cluster.kill9(victim)
        story = page.page.locator(".story")
        expect(story).to_contain_text(f"{victim} is marked down.", timeout=STORY_MS)
        expect(story).to_contain_text(re.compile(rf"leads .* in place of {victim}"))
        expect(page.page.get_by_text(f"{victim} was lost at")).to_be_visible()
        expect(page.page.locator(".state.down")).not_to_have_count(0)
        # Other screens name the node whose part is missing, and show the rest.
        port = cluster.nodes[watched].admin_port
        page.open(port, "#/drops")
        missing = page.page.get_by_text(f"{victim} is down; its part is missing.")
        expect(missing).to_be_visible()
        expect(page.page.get_by_role("region", name="Limits")).to_contain_text(watched)
        # The overview is as calm as the screen of the cluster.
        page.open(port, "#/")
        health = page.page.locator(".health.warn")
        expect(health).to_contain_text(f"Node {victim} is down.")
        expect(health).to_contain_text("Every partition still acknowledges")
        page.open(port, "#/timeline?seconds=60")
        cluster.restart(victim)
        expect(story).to_contain_text(f"{victim} is up again.", timeout=STORY_MS)
        cluster.wait_healthy()
    # A span of the picture is a part of the address, and has its own story.
    box = page.page.locator(".picture svg").bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 60, steps=3)
    page.page.mouse.up()
    expect(page.page.get_by_role("heading", name="What happened from")).to_be_visible()
    assert "from=" in page.page.evaluate("location.hash")


def test_a_drain_shows_its_plan_before(cluster: ClusterProcesses, page: ConsolePage) -> None:
    page.open(cluster.nodes["n1"].admin_port, "#/cluster")
    expect(page.page.locator(".seat.leader").first).to_be_visible()
    card = page.page.locator(".node", has_text="n2")
    card.get_by_role("button", name="Drain…").click()
    dialog = page.page.get_by_role("dialog")
    expect(dialog).to_contain_text("Partitions led afterwards")
    expect(dialog).to_contain_text("n2 0")
    dialog.get_by_role("button", name="Drain n2").click()
    expect(card).to_contain_text("draining")
    until(lambda: all("n2" not in each["replicas"] for each in cluster.status()["partitions"]),
          "n2 has nothing")  # fmt: skip
    card.get_by_role("button", name="Undrain…").click()
    dialog.get_by_role("button", name="Undrain n2").click()
    expect(card.get_by_role("button", name="Drain…")).to_be_visible()
    cluster.wait_healthy()


def test_a_viewer_sees_everything_and_no_control(
    cluster: ClusterProcesses, page: ConsolePage
) -> None:
    node = cluster.nodes["n3"]
    node.token = made_token(node.data, "admin")
    viewer = made_token(node.data, "viewer")
    until(lambda: ask(node.admin_port, "GET", "/api/v1/log").status == 401, "tokens are needed")
    page.open(node.admin_port, f"#token={viewer}&to=cluster")
    expect(page.page.locator(".seat.leader").first).to_be_visible()
    assert page.page.get_by_role("button", name="Drain…").count() == 0
    assert page.page.get_by_role("button", name="Rebalance").count() == 0
    assert page.page.get_by_role("link", name="Audit").count() == 0
    page.open(node.admin_port, "#/audit")
    expect(page.page.get_by_text("This screen needs the role admin.")).to_be_visible()
    page.open(node.admin_port, "#/access")
    expect(page.page.get_by_role("heading", name="What may a client do?")).to_be_visible()
    assert page.page.get_by_role("region", name="Tokens").count() == 0
    for fragment in ("#/cluster", "#/timeline", "#/settings"):
        page.page.set_viewport_size({"width": 400, "height": 800})
        page.open(node.admin_port, fragment)
        expect(page.page.get_by_role("heading", level=1)).to_be_visible()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 400, fragment
