"""Drops, refusals and slow sessions are seen in the console with their last cases, and a client is
banned."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire

pytestmark = pytest.mark.long
BANNED = 0x8A


def test_refusals_and_a_session_that_is_behind(
    start_holdfast: StartHoldfast, tmp_path: Path, page: ConsolePage
) -> None:
    rules = tmp_path / "acl.txt"
    rules.write_text("topic readwrite plant/#\n")
    broker = start_holdfast(settings={"security": {"acl_file": str(rules)}})
    with Wire(broker.port) as client:
        client.connect("away", expiry_s=1000)
        client.subscribe(("plant/#", 1))
    with Wire(broker.port) as client:
        client.connect("pump")
        client.publish("plant/1", b"1", qos=1)
        client.publish("<b>secret</b>", b"1", qos=1)
    view = page.page
    page.open(broker.admin_port, "#/drops")
    expect(view.get_by_role("region", name="Refused publishes")).to_contain_text("not authorised")
    cases = view.get_by_role("region", name="Last cases")
    expect(cases).to_contain_text("publish_denied")
    expect(cases).to_contain_text("<b>secret</b>")
    view.get_by_role("region", name="Slow sessions").get_by_role("link", name="away").click()
    drawer, dialog = view.get_by_role("complementary"), view.get_by_role("dialog")
    expect(drawer).to_contain_text("Position in each partition")
    drawer.get_by_role("button", name="Ban…").click()
    expect(dialog.get_by_label("What")).to_contain_text("client id: away")
    dialog.get_by_label("Reason").fill("a <b>test</b>")
    dialog.get_by_role("button", name="Ban", exact=True).click()
    expect(view.get_by_text("The name is banned.")).to_be_visible()
    with Wire(broker.port) as client:
        assert client.connect("away", expiry_s=1000).reason == BANNED
    page.open(broker.admin_port, "#/bans")
    expect(view.get_by_role("region", name="Bans")).to_contain_text("a <b>test</b>")
    view.get_by_role("button", name="Lift").click()
    dialog.get_by_role("button", name="Lift").click()
    expect(view.get_by_text("No name is banned or locked out.")).to_be_visible()
    with Wire(broker.port) as client:
        assert client.connect("away", expiry_s=1000).reason == 0
