"""Topics are opened, cleared and restored in the console, and a message is traced to a client."""

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire
from tests.support.api_client import Api

pytestmark = pytest.mark.long


def test_a_branch_is_cleared_and_restored_and_a_message_is_traced(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    broker = start_holdfast()
    with Wire(broker.port) as client:
        client.connect("away", expiry_s=1000)
        client.subscribe(("plant/#", 1))
    with Wire(broker.port) as client:
        client.connect("pump")
        client.publish("plant/1/state", b"running", qos=1, retain=True)
        client.publish("plant/2/state", b"stopped", qos=1, retain=True)
    view, api = page.page, Api(broker.admin_port)
    page.open(broker.admin_port, "#/topics")
    view.get_by_role("button", name="Open plant", exact=True).click()
    expect(view.get_by_role("link", name="state")).to_have_count(0)
    view.get_by_role("button", name="Open plant/1").click()
    expect(view.get_by_text("running")).to_be_visible()
    view.get_by_role("link", name="plant", exact=True).click()
    view.get_by_role("button", name="Delete retained…").click()
    dialog = view.get_by_role("dialog")
    expect(dialog).to_contain_text("2 retained messages are deleted.")
    assert len(api.get("retained", filter="plant/#")["messages"]) == 2
    dialog.get_by_role("button", name="Delete retained").click()
    expect(view.get_by_text("2 retained messages were deleted.")).to_be_visible()
    assert api.get("retained", filter="plant/#")["messages"] == []
    view.get_by_role("button", name="Undo").click()
    expect(view.get_by_text("2 retained messages are back.")).to_be_visible()
    assert len(api.get("retained", filter="plant/#")["messages"]) == 2

    page.open(broker.admin_port, "#/trace?topic=plant/1/state&client=away")
    expect(view.get_by_text("it waits in the log for the session").first).to_be_visible()
    view.get_by_role("textbox", name="Client id").fill("stranger")
    expect(view.get_by_text("The log knows no session of stranger")).to_be_visible()
