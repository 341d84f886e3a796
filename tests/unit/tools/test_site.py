"""The documentation site is built, and each link in it leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_the_site_is_built(tmp_path: Path) -> None:
    """In strict mode: a link or an anchor that is not there, or a page that the navigation leaves
    out, is an error. No page takes a script or a style from a server."""
    done = subprocess.run(
        [sys.executable, "tools/docs_site.py", "--check", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.glob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert not re.findall(
            r'<(?:script|link|img)[^>]* (?:src|href)="https?:[^"]*"', page.read_text()
        )
    found = (tmp_path / "search" / "search_index.js").read_text()
    assert "What a PUBACK promises" in found
    assert "def spark_account" not in found
    gathered = ROOT / "build" / "site-source" / "reference"
    assert "### `GET /api/v1/clients`" in (gathered / "api.md").read_text()
    assert "### holdfast cluster drain" in (gathered / "commands.md").read_text()
    assert "| `0x97` | Quota exceeded |" in (gathered / "reasons.md").read_text()
    assert "| `packet_bytes` |" in (gathered / "configuration.md").read_text()


def test_the_start_has_only_commands_that_run() -> None:
    """Tests run the commands of README.md; those of the start are the same ones."""
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^(?:holdfast|pip) .*", (DOCS / "start.md").read_text(), re.MULTILINE)
    assert len(commands) > 8
    for command in commands:
        assert command in readme, command
