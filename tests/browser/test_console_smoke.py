"""The console opens in a browser, logs in by token and by password, and shows the broker."""

from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_admin_access import PASSWORD, access, made_token


def test_the_console_shows_the_broker(start_holdfast: StartHoldfast, page: ConsolePage) -> None:
    broker = start_holdfast()
    token = made_token(broker.data, "viewer")
    done = access("user", "add", "ada", "--role", "admin", "--data", str(broker.data),
                  given=PASSWORD + "\n")  # fmt: skip
    assert done.returncode == 0, done.stderr
    page.open(broker.admin_port, f"#token={token}&to=")
    expect(page.page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.page.get_by_text("The broker serves clients.")).to_be_visible()
    # The token is gone from the address, and the cookie is not for scripts.
    assert page.page.evaluate("location.hash") == "#/"
    assert page.page.evaluate("document.cookie") == ""
    page.page.get_by_role("button", name="Log out").click()
    page.page.get_by_label("User").fill("ada")
    page.page.get_by_label("Password").fill("wrong")
    page.page.get_by_role("button", name="Log in").click()
    expect(page.page.get_by_text("user or password is wrong")).to_be_visible()
    page.page.get_by_label("Password").fill(PASSWORD)
    page.page.get_by_role("button", name="Log in").click()
    expect(page.page.get_by_text("user ada")).to_be_visible()
