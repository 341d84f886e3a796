"""The examples are typed as strict editors want them: what they use of Holdfast has types."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.long


def check(*arguments: str) -> list[str]:
    """The errors, as FILE:LINE and text."""
    pytest.importorskip("basedpyright", reason="pip install '.[types]', as make long does")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 0, done.stderr
    return [
        f"{each['file']}:{each['range']['start']['line'] + 1} {each['message']}"
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def test_examples() -> None:
    assert check() == []


def test_a_wrong_call_is_found(tmp_path: Path) -> None:
    """The package says `py.typed`, so a mistake of its user is an error."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from holdfast.client import Client\n\n\nasync def main() -> None:\n"
        '    async with Client("127.0.0.1") as client:\n'
        '        await client.publish("topic", 5, qos="1")\n'
    )
    [first, second] = check(str(wrong))
    assert "wrong.py:6" in first
    assert '"payload"' in first
    assert "wrong.py:6" in second
    assert '"qos"' in second
