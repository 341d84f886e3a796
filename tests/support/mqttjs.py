"""MQTT.js from npm, for tests with the client of web pages and of Node.js."""

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
NPM = shutil.which("npm")
VERSION = "5.10.4"
INSTALL_S = 60


def find(directory: Path) -> Path | None:
    """Install the package below `directory` and return its folder. None: without a registry."""
    command = [str(NPM), "install", "--prefix", str(directory), "--prefer-offline", "--no-audit"]
    done = subprocess.run(
        [*command, f"mqtt@{VERSION}"], capture_output=True, timeout=INSTALL_S, check=False
    )
    return directory / "node_modules" / "mqtt" if done.returncode == 0 else None


def installed(directory: Path) -> Path:
    """Return the library that `find` returns, or skip the test without a registry."""
    library = find(directory)
    if library is None:
        pytest.skip("npm cannot install mqtt here")
    return library
