"""Drops, refusals and slow sessions are seen in the console with their last cases."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire

pytestmark = pytest.mark.long


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
    expect(view.get_by_role("complementary")).to_contain_text("Position in each partition")
