"""A real browser: Debian's Chromium, driven by Playwright, and pages that must behave."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import start_holdfast

__all__ = ["start_holdfast"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium")
    with sync_playwright() as playwright:
        # Without a sandbox, because tests may run as root.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[ConsolePage]:
    """A page that has shown no error, broken no policy and asked no other host at its end."""
    found = ConsolePage(browser)
    yield found
    found.close()
    assert found.complaints == []
