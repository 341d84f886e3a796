"""A session is inspected and moved in the console, and its messages are seen in the log."""

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire
from tests.support.api_client import Api

pytestmark = pytest.mark.long
HOSTILE = "<img src=x onerror=alert(1)>\u202etxt"


def test_a_session_is_moved_and_its_messages_are_seen(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    broker = start_holdfast()
    with Wire(broker.port) as client:
        client.connect("away", expiry_s=1000)
        client.subscribe(("plant/#", 1))
    with Wire(broker.port) as client:
        client.connect("pump")
        for number in range(5):
            client.publish("plant/1", b'{"n": %d}' % number, qos=1)
        client.publish("plant/hostile", HOSTILE.encode(), qos=1)
    shown = page.page
    page.open(broker.admin_port, "#/sessions")
    shown.get_by_role("row").filter(has_text="away").click()
    drawer = shown.get_by_role("complementary")
    expect(drawer.locator(".story li").filter(has_text="plant/#")).to_be_visible()
    expect(drawer.locator(".story li").filter(has_text="Connection lost")).to_be_visible()
    shown.get_by_role("button", name="Move in the log").click()
    shown.get_by_role("button", name="Count first").click()
    expect(shown.get_by_text("6 messages are skipped, 0 are sent again")).to_be_visible()
    shown.get_by_role("dialog").get_by_role("button", name="Move in the log").click()
    expect(shown.get_by_text("The session was moved.")).to_be_visible()
    detail = Api(broker.admin_port).get("session", client="away")
    # After the end that it was moved to come the records of its own move and end.
    assert detail["session"]["log_lag"] <= 2

    page.open(broker.admin_port, "#/log?filter=plant/1")
    shown.get_by_role("row").filter(has_text='{"n": 4}').click()
    shown.get_by_role("button", name="Changes").click()
    expect(shown.locator("td.old")).to_have_text("3")
    page.open(broker.admin_port, "#/log?filter=plant/hostile")
    expect(shown.get_by_text("<img src=x onerror=alert(1)>")).to_be_visible()
    expect(shown.get_by_text("U+202E")).to_be_visible()
    assert shown.locator("main img").count() == 0
