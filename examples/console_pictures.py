"""Pictures of the console, taken by Chromium through Playwright."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZE = {"width": 1280, "height": 860}
SETTLE_MS = 1500
"""Screens ask every one or two seconds, and lines are drawn of two replies at least."""


class Unavailable(Exception):
    """A part is missing here. The text says which one, and how to install it."""


@dataclass(frozen=True)
class Picture:
    """One screen of one broker: the name of the file, the screen with its parameters, and a CSS
    selector of what is there when the screen is complete."""

    name: str
    screen: str
    awaited: str
    scheme: str = "light"
    height: int = SIZE["height"]
    selected: str = ""
    """Clicked before the picture is taken."""
    settle_ms: int = SETTLE_MS


class Camera:
    """A browser that takes pictures. `with camera() as it:` starts and ends it."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def take(
        self, admin: str, token: str, pictures: Iterable[Picture], directory: Path
    ) -> list[Path]:
        """Log in at `admin`, take the pictures, and return their files."""
        directory.mkdir(parents=True, exist_ok=True)
        taken: list[Path] = []
        for picture in pictures:
            context = self._browser.new_context(
                viewport={**SIZE, "height": picture.height}, color_scheme=picture.scheme
            )
            page = context.new_page()
            start = f"#token={token}&to=" if token else "#/"
            page.goto(f"http://{admin}/console/{start}")
            # Logged in: the navigation is there.
            page.locator("nav .links a").first.wait_for()
            page.goto(f"http://{admin}/console/#/{picture.screen}")
            page.locator(picture.awaited).first.wait_for()
            if picture.selected:
                page.locator(picture.selected).first.click()
            page.wait_for_timeout(picture.settle_ms)
            file = directory / f"{picture.name}.png"
            page.screenshot(path=file)
            shrink(file)
            taken.append(file)
            context.close()
        return taken


def shrink(file: Path) -> None:
    """Give a picture a palette of 256 colours, a third of its size, if Pillow is here."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


@contextlib.contextmanager
def camera() -> Iterator[Camera]:
    """A running camera. Raises Unavailable without Playwright or Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise Unavailable("no Playwright here: pip install playwright") from None
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise Unavailable("no Chromium here: apt install chromium")
    with sync_playwright() as playwright:
        # Without a sandbox, because root may run it; the pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield Camera(browser)
        browser.close()


def check() -> None:
    """Raise Unavailable without Playwright or Chromium, before anything is started."""
    with camera():
        pass
