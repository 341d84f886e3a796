"""The screens of one broker in a browser: hostile messages, users and tokens, settings, audit."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.cluster_processes import until
from tests.e2e.listeners_broker import ListenersBroker
from tests.e2e.test_admin_access import ask, made_token
from tests.e2e.wire import Wire
from tests.support.ports import free_port

pytestmark = pytest.mark.long
HOSTILE = b"<img src=x onerror=alert(1)>\xff\xe2\x80\xaeevil\x00"


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListenersBroker]:
    listeners = [{"port": free_port(), "transport": "websocket"}]
    broker = ListenersBroker(tmp_path_factory.mktemp("broker"), listeners)
    broker.start()
    yield broker
    broker.kill()


def test_hostile_messages_are_text(broker: ListenersBroker, page: ConsolePage) -> None:
    """Over the WebSocket of the page itself, which its policy allows."""
    view = page.page
    view.on("dialog", lambda dialog: page.complaints.append(f"a dialog: {dialog.message}"))
    page.allowed.append(f"127.0.0.1:{broker.listeners[0]['port']}")
    page.open(broker.admin_port, "#/client")
    view.get_by_role("button", name="Connect").click()
    view.get_by_label("Topic filter").fill("<b>/#")
    view.get_by_role("button", name="Subscribe", exact=True).click()
    expect(view.get_by_label("Unsubscribe from <b>/#")).to_be_visible()
    with Wire(broker.port) as client:
        client.connect("hostile")
        client.publish("<b>/x", HOSTILE, qos=1)
        client.publish("<b>/huge", b"x" * 300_000, qos=1)
    messages = view.get_by_role("region", name="Messages")
    expect(messages).to_contain_text("<img src=x onerror=alert(1)>")
    expect(messages).to_contain_text("U+202E")
    expect(messages).to_contain_text("U+0000")
    expect(messages).to_contain_text("characters")
    assert messages.locator("img, b").count() == 0
    view.get_by_label("Topic", exact=True).fill("<b>/mine")
    view.get_by_label("Payload").fill("by me")
    view.get_by_role("button", name="Publish").click()
    expect(view.get_by_text("Published.")).to_be_visible()
    expect(messages).to_contain_text("by me")


def test_users_tokens_settings_and_the_audit(broker: ListenersBroker, page: ConsolePage) -> None:
    token = made_token(broker.data, "admin")
    until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401, "tokens are needed")
    view = page.page
    page.open(broker.admin_port, f"#token={token}&to=access")
    view.get_by_role("button", name="Add a user…").click()
    dialog = view.get_by_role("dialog")
    dialog.get_by_label("Name").fill("ada")
    dialog.get_by_label("Password").fill("a long password")
    dialog.get_by_role("button", name="Add").click()
    expect(view.get_by_role("region", name="Users")).to_contain_text("ada")
    view.get_by_role("button", name="Make a token…").click()
    dialog.get_by_label("What it is for").fill("a <test>")
    dialog.get_by_role("button", name="Add").click()
    expect(dialog).to_contain_text("holdfast_")
    dialog.get_by_role("button", name="I have noted it").click()
    expect(view.get_by_role("region", name="Tokens")).to_contain_text("a <test>")
    view.set_viewport_size({"width": 400, "height": 800})
    assert page.cut_tables() == []
    page.open(broker.admin_port, "#/drops")
    expect(view.get_by_role("region", name="Limits")).to_contain_text("limits.sessions")
    assert page.cut_tables() == []
    view.set_viewport_size({"width": 1280, "height": 800})
    # The browser logs each 404 of a script.
    absent: list[str] = []
    view.on("response", lambda each: absent.append(each.url) if each.status == 404 else None)
    page.open(broker.admin_port, "#/federation")
    expect(view.get_by_text("This broker belongs to no federation.")).to_be_visible()
    assert absent == []
    page.open(broker.admin_port, "#/settings")
    expect(view.get_by_role("region", name="Settings")).to_contain_text("websocket")
    page.open(broker.admin_port, "#/audit")
    audit = view.get_by_role("region", name="Audit")
    expect(audit).to_contain_text("name=ada role=viewer")
    audit.get_by_text("add a user").click()
    expect(view.get_by_label("Details")).to_contain_text("POST /api/v1/users")
    expect(view.get_by_label("Details")).to_contain_text('"name": "ada"')
