"""MQTT.js from npm, for tests with the client of web pages and of Node.js."""

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
NPM = shutil.which("npm")
VERSION = "5.10.4"
INSTALL_S = 60


def installed(directory: Path) -> Path:
    """Install the package below `directory` and return its folder. Without a registry: skip."""
    command = [str(NPM), "install", "--prefix", str(directory), "--prefer-offline", "--no-audit"]
    done = subprocess.run(
        [*command, f"mqtt@{VERSION}"], capture_output=True, timeout=INSTALL_S, check=False
    )
    if done.returncode != 0:
        pytest.skip("npm cannot install mqtt here")
    return directory / "node_modules" / "mqtt"
