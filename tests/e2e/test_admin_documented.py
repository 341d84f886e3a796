"""Runs the commands of two pages of the documents, in their order, against a broker."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.test_admin_access import ask
from tests.support.waiting import until

REMARK = re.compile(r"\s+# .*$", re.MULTILINE)
AT_THE_DEFAULT_PORT = re.compile(r"^holdfast (?!.*(--data|--admin)).*$", re.MULTILINE)
"""A command that names neither a directory nor a broker. It is run at the test's broker."""
STATE = (
    "sub -i pump-7 -c -q 1 -t plant/# -E",
    "pub -q 1 -t plant/1/state -m on",
    "pub -q 1 -r -t plant/old/1 -m gone",
)
"""What the commands of the page are about."""
DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text() for name in ("admin-api.md", "admission.md"))


def test_the_commands_of_the_pages(tmp_path: Path) -> None:
    shim = tmp_path / "bin" / "holdfast"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast.cli.main "$@"\n')
    shim.chmod(0o755)
    environment = dict(os.environ, PYTHONPATH=str(SOURCE))
    environment["PATH"] = f"{shim.parent}:{environment['PATH']}"
    broker = Holdfast(tmp_path)
    broker.start()
    for words in STATE:
        subprocess.run(
            [str(shim), *words.split(), "-p", str(broker.port)],
            env=environment, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
    blocks = re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL)
    assert len(blocks) >= 5
    outputs = []
    for block in blocks:
        text = REMARK.sub("", block).replace("127.0.0.1:18083", f"127.0.0.1:{broker.admin_port}")
        text = text.replace("curl ", "curl --fail --silent --show-error ")
        text = text.replace("2026-01-31T12:00:00Z", datetime.now(UTC).isoformat()[:19] + "Z")
        text = AT_THE_DEFAULT_PORT.sub(
            rf"\g<0> --admin 127.0.0.1:{broker.admin_port} --token-file admin.token", text
        )
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, (block, done.stderr)
        outputs.append(done.stdout)
        until(
            lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401,
            "the token is not noticed",
        )
    assert (tmp_path / "admin.token").read_text().startswith("holdfast_")
    assert "admin" in outputs[0]
    assert '"ranges"' in outputs[1]
    assert any('"entries"' in each for each in outputs)
    assert any("published it at QoS 1" in each for each in outputs)
    assert "contractor" in outputs[-1]
    broker.kill()
