"""A page of the console in a browser, with what the browser complains about."""

from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Error, Request, expect

WAIT_MS: Final = 15_000
EXPECTED: Final = (
    "401",
    "403",
    "404",
    "409",
    "410",
    "503",
    "ERR_CONNECTION",
    "ERR_INCOMPLETE_CHUNKED",
)
"""Refusals and lost connections are shown to the user, and reported by the browser as well."""
expect.set_options(timeout=WAIT_MS)


class ConsolePage:
    """One page. `complaints` has errors of scripts, violations of the policy, and requests to other
    hosts; it must be empty at the end."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        """`options`: of the browser's context, for example `color_scheme` and `viewport`."""
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.allowed: list[str] = []
        """Hosts and ports that the page may ask besides its own: WebSocket listeners."""
        self._host = ""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("request", self._on_request)

    def open(self, admin_port: int, fragment: str = "#/") -> None:
        """Open the console of a broker."""
        self._host = f"127.0.0.1:{admin_port}"
        self.page.goto(f"http://{self._host}/console/{fragment}")

    def cut_tables(self) -> list[str]:
        """The tables whose right part is not on the screen."""
        found: list[str] = self.page.evaluate(
            "[...document.querySelectorAll('.table')].filter(each => each.scrollWidth >"
            " each.clientWidth + 1).map(each => each.getAttribute('aria-label'))"
        )
        return found

    def close(self) -> None:
        self.context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        # A violation of the policy is an error here.
        if message.type == "error" and not any(each in message.text for each in EXPECTED):
            self.complaints.append(message.text)

    def _on_error(self, error: Error) -> None:
        self.complaints.append(f"{error}\n{error.stack}")

    def _on_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc not in (
            self._host,
            *self.allowed,
        ) and not request.url.startswith("data:"):
            self.complaints.append(f"a request to {request.url}")
