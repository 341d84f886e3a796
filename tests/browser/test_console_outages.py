"""What ends while a page is open is told where the user looks, and the page goes on by itself: a
login, a broker, and records that retention removed."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.pages import ConsolePage
from tests.e2e.cluster_processes import until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_admin_access import ask, made_token
from tests.e2e.wire import Wire
from tests.support.api_client import Api

pytestmark = pytest.mark.long
SEGMENT_BYTES = 1 << 16
HUGE_BYTES = 2_000_000
SETTINGS = {
    "log": {"segment_bytes": SEGMENT_BYTES},
    "log.retention": {"bytes": 4 * SEGMENT_BYTES},
}


def test_a_restart_and_an_expired_login_are_survived(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    broker = start_holdfast()
    view = page.page
    with Wire(broker.port) as client:
        client.connect("pump")
        client.publish("plant/1", b"kept", qos=1)
    page.open(broker.admin_port, "#/log?filter=plant/%23")
    expect(view.get_by_role("region", name="Log")).to_contain_text("kept")
    broker.kill()
    expect(view.get_by_text("The broker does not reply. The page tries again")).to_be_visible()
    # What was loaded is still shown.
    expect(view.get_by_role("region", name="Log")).to_contain_text("kept")
    broker.start()
    expect(view.get_by_text("The broker replies again.")).to_be_visible()
    expect(view.get_by_role("alert")).to_have_count(0)
    expect(view.get_by_text("live", exact=True)).to_be_visible()

    admin = made_token(broker.data, "admin")
    viewer = made_token(broker.data, "reader")
    until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401, "tokens are needed")
    page.open(broker.admin_port, f"#token={viewer}&to=sessions")
    expect(view.get_by_role("heading", name="Sessions")).to_be_visible()
    [ident] = [each["id"] for each in tokens(broker.admin_port, admin) if each["role"] == "reader"]
    assert ask(broker.admin_port, "DELETE", f"/api/v1/tokens/{ident}", admin).status == 200
    expect(view.get_by_text("Your session has ended.")).to_be_visible()
    # The page goes on where it was.
    log_in(view, admin)
    assert view.evaluate("location.hash") == "#/sessions"


def test_an_ended_login_is_told_by_the_stream_alone(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    """The stream may end before a request is refused. A refusal that was under way at a login ends
    only the login before."""
    broker, view = start_holdfast(), page.page
    admin, viewer = made_token(broker.data, "admin"), made_token(broker.data, "viewer")
    until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401, "tokens are needed")
    page.open(broker.admin_port, f"#token={viewer}&to=sessions")
    expect(view.get_by_text("live", exact=True)).to_be_visible()
    rows, logins = list[Route](), list[Route]()
    with view.expect_request("**/api/v1/sessions?*"):
        view.route("**/api/v1/sessions?*", lambda route: rows.append(route))
    [ident] = [each["id"] for each in tokens(broker.admin_port, admin) if each["role"] == "viewer"]
    assert ask(broker.admin_port, "DELETE", f"/api/v1/tokens/{ident}", admin).status == 200
    expect(view.get_by_text("Your session has ended.")).to_be_visible()
    log_in(view, admin)
    view.unroute("**/api/v1/sessions?*")
    expect(view.get_by_text("live", exact=True)).to_be_visible()

    def hold(route: Route) -> None:
        if route.request.method == "GET":
            logins.append(route)
        else:
            route.continue_()

    view.route("**/api/v1/login", hold)
    with view.expect_request("**/api/v1/login"):
        view.evaluate("""async () => {
          const { identify } = await import("/console/api.js");
          identify();
        }""")
    view.route("**/api/v1/sessions?*", lambda route: route.fulfill(status=401, body="{}"))
    expect(view.get_by_text("Your session has ended.")).to_be_visible()
    view.unroute("**/api/v1/sessions?*")
    log_in(view, admin)
    with view.expect_response("**/api/v1/login"):
        logins[0].fulfill(status=401, body="{}")
    expect(view.get_by_text("live", exact=True)).to_be_visible()
    expect(view.get_by_text("Your session has ended.")).to_have_count(0)


def log_in(view: Page, token: str) -> None:
    """Log in again, and return at the screen of before."""
    view.get_by_role("button", name="Use a token instead").click()
    view.get_by_label("Token").fill(token)
    view.get_by_role("button", name="Log in").click()
    expect(view.get_by_role("heading", name="Sessions")).to_be_visible()


def test_a_reply_that_ends_early_is_no_data(
    start_holdfast: StartHoldfast, page: ConsolePage
) -> None:
    broker, view = start_holdfast(), page.page
    view.route("**/api/v1/sessions?*", lambda route: route.fulfill(status=200, body='{"rows": ['))
    page.open(broker.admin_port, "#/")
    expect(view.get_by_role("alert")).to_contain_text("The broker does not reply.")
    view.unroute("**/api/v1/sessions?*")
    expect(view.get_by_role("alert")).to_have_count(0)
    expect(view.get_by_text("Every session is at the end of the log.")).to_be_visible()


def tokens(port: int, token: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = ask(port, "GET", "/api/v1/tokens", token).json
    return found


def test_a_gap_by_retention_and_a_huge_payload(
    start_holdfast: StartHoldfast, tmp_path: Path, page: ConsolePage
) -> None:
    broker = start_holdfast(settings=SETTINGS)
    api, view = Api(broker.admin_port), page.page
    with Wire(broker.port) as client:
        client.connect("pump")
        client.publish("plant/1", b"first", qos=1)
        first = api.get("log/records", filter="plant/1")["records"][0]
        place = f"{first['partition']}/{first['offset']}"
        page.open(broker.admin_port, f"#/log?filter=plant/1&at={place}")
        expect(view.get_by_label("Details")).to_contain_text("first")
        client.publish("plant/1", b"<b>" + b"x" * HUGE_BYTES, qos=1)

        def is_gone() -> bool:
            client.publish("plant/1", b"x" * 30_000, qos=1)
            kept = api.get("log/records", filter="plant/1", order="oldest", limit=1)["records"]
            return not kept or kept[0]["offset"] > first["offset"]

        until(is_gone, "retention has removed the first record")
        client.publish("plant/1", b"<b>" + b"y" * HUGE_BYTES, qos=1)
    view.reload()
    expect(view.get_by_text("the record was removed by retention")).to_be_visible()
    row = view.get_by_role("row").filter(has_text="<b>yyyy")
    expect(row).to_have_count(1)
    row.click()
    details = view.get_by_label("Details")
    expect(details).to_contain_text("The first part of 2.0 MB")
    assert len(details.inner_text()) < 30_000
    with view.expect_download() as download:
        details.get_by_role("link", name="Download all").click()
    download.value.save_as(tmp_path / "payload")
    assert (tmp_path / "payload").stat().st_size == HUGE_BYTES + 3
