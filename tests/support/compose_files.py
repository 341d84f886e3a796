"""The compose files of deploy/, and the secrets as the comment at the top of each makes them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose"
FEDERATION = DEPLOY / "federation" / "docker-compose.yml"
PASSWORD = "a password"


def parse(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def make_secrets(path: Path, directory: Path) -> None:
    """Run the commands of the comment at the top in another directory, as root. The terminal would
    ask for a password, and get PASSWORD."""
    head = path.read_text().partition("\nname: ")[0]
    for command in re.findall(r"^#   (.+)$", head, flags=re.MULTILINE):
        if "docker compose" in command:
            continue
        command = command.replace("sudo ", "").replace("passwd -c ", "passwd -c -b ")
        command = command.replace("passwords meter", f"passwords meter {PASSWORD!r}")
        command = re.sub(
            r"\bholdfast passwd", f"{sys.executable} -m holdfast.cli.main passwd", command
        )
        done = subprocess.run(
            ["bash", "-ec", command], cwd=directory, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
