"""The files of the console: the libraries are those that are listed, and all together are small."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.api.console.pages import COMMENTS, SPACES, page_files, policy_for
from holdfast.config.listener import Listener

SITE = Path(holdfast.__file__).parent / "api" / "console" / "site"
VENDOR = SITE / "vendor"
SIZE_MAX = 201_000
"""The most bytes of all files that a browser may load."""
LICENCES = {"MIT", "ISC", "Apache-2.0"}
OWN = sorted(path for path in SITE.rglob("*.js") if VENDOR not in path.parents)


def listed() -> dict[str, str]:
    packages = tomllib.loads((VENDOR / "VENDOR.toml").read_text())["package"]
    for package in packages:
        assert package["licence"] in LICENCES
        assert package["version"] in package["url"]
        assert re.fullmatch("[0-9a-f]{64}", package["sha256"])
    return {file["file"]: file["sha256"] for package in packages for file in package["files"]}


def test_the_libraries_are_those_that_are_listed() -> None:
    found = {path.name: path.read_bytes() for path in VENDOR.iterdir() if path.suffix != ".toml"}
    texts = found.pop("LICENCES.txt").decode()
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == listed()
    for package in tomllib.loads((VENDOR / "VENDOR.toml").read_text())["package"]:
        assert f"{package['name']} {package['version']} ({package['licence']})" in texts


def test_a_page_may_reach_the_websocket_listeners_of_its_broker_and_nothing_else() -> None:
    listeners = [
        Listener(port=1883),
        Listener(port=8083, transport="websocket"),
        Listener(port=8084, transport="websocket", certificate="c.pem"),
    ]
    assert "connect-src 'self';" in policy_for("broker", listeners[:1])
    found = policy_for("broker", listeners)
    assert "connect-src 'self' ws://broker:8083 wss://broker:8084;" in found
    # A name that could end the directive is not in it.
    assert "ws:" not in policy_for("a; script-src *", listeners)


def test_all_files_together_are_small() -> None:
    files = page_files()
    assert "index.html" in files
    assert not any("LICENCES" in name or "toml" in name for name in files)
    assert sum(len(file.data) for file in files.values()) <= SIZE_MAX


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_modules_are_sent_without_their_comments_and_otherwise_as_they_are(path: Path) -> None:
    """A comment ends where it seems to, so nothing else is cut: no string contains its marks."""
    text = path.read_text()
    sent = page_files()[str(path.relative_to(SITE))].data.decode()
    assert "/**" not in sent
    assert "*/" not in sent
    for quoted in re.findall(r'"[^"\n]*"', re.sub(r"/\*\*.*?\*/", "", text, flags=re.DOTALL)):
        assert "/**" not in quoted
        assert not SPACES.search(quoted)
    # Text of templates: between the end of a tag, which follows no space, and a tag or a value.
    for shown in re.findall(r"(?<![=>\s])>([^<>`${}\n]*[<`$])", COMMENTS.sub("", text)):
        assert not SPACES.search(shown)
    assert "".join(COMMENTS.sub("", text).split()) == "".join(sent.split())


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_modules_ask_nothing_of_elsewhere(path: Path) -> None:
    """Relative imports of files that are there; no address, no markup from text, no eval."""
    text = path.read_text()
    for name in re.findall(r"""(?:from|import) ["\']([^"\']+)["\']""", text):
        assert name.startswith("."), name
        assert (path.parent / name).resolve().is_relative_to(SITE)
        assert (path.parent / name).exists(), name
    for word in ("https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                 "dangerouslySetInnerHTML", "eval(", "new Function", "javascript:"):  # fmt: skip
        assert word not in text, word
