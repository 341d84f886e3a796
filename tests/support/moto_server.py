"""The S3 server of the package moto, for tests marked `long`: pip install 'moto[server]'."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.support.ports import free_port

BUCKET = "lake"
START_S = 60.0
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


def is_installed() -> bool:
    return find_spec("moto") is not None and find_spec("flask") is not None


@contextmanager
def moto_server(log: Path) -> Iterator[str]:
    """The address of a server with the bucket BUCKET."""
    port = free_port()
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-p", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        make_bucket(f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def make_bucket(endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=START_S):
                return
        except URLError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
