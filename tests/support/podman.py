"""Podman of Debian as the engine of docker-compose, with images, volumes and networks of its own in
a directory of the test."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

TIMEOUT_S = 180.0
PROGRAMS = ("podman", "docker-compose", "runc", "netavark", "aardvark-dns")

SETTINGS = """
[containers]
# Podman would raise them, which a sandbox may not allow.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{networks}"
"""


def is_installed() -> bool:
    return all(shutil.which(each) or Path("/usr/lib/podman", each).exists() for each in PROGRAMS)


class Engine:
    """`with Engine(image) as engine:` has the image loaded and listens for docker-compose. Leaving
    it removes every container, volume and network of it."""

    def __init__(self, image: Path) -> None:
        # Podman's run directory has at most 50 characters, which those of pytest may exceed.
        self.directory = directory = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))
        self._image = image
        self._settings = directory / "containers.conf"
        self._socket = directory / "podman.sock"
        self._service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        self._settings.write_text(SETTINGS.format(networks=self.directory / "networks"))
        self.run("load", "-q", "-i", str(self._image))
        self._service = subprocess.Popen(
            [*self._podman(), "system", "service", "-t", "0", f"unix://{self._socket}"],
            env=self._environment(),
            stderr=(self.directory / "service.log").open("wb"),
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not self._listens():
            assert time.monotonic() < deadline, "podman listens"
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for name in self.run("ps", "-a", "--format", "{{.Names}}").split():
                error.add_note(f"log of {name}:\n{self.logs(name)[-4000:]}")
        for what in (["pod", "rm", "-fa"], ["rm", "-fav", "-t", "0"], ["volume", "prune", "-f"]):
            self.run(*what)
        self.run("network", "prune", "-f")
        self.run("rmi", "-fa")
        assert self._service is not None
        self._service.terminate()
        self._service.wait(TIMEOUT_S)
        # Podman mounts its store upon itself, and the directory could not be deleted.
        store = self.directory / "images" / "overlay"
        if store.is_mount():
            subprocess.run(["umount", str(store)], check=True)
        shutil.rmtree(self.directory)

    def _podman(self) -> list[str]:
        root, run = self.directory / "images", self.directory / "run"
        return ["podman", "--root", str(root), "--runroot", str(run), "--storage-driver", "overlay"]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self._settings),
            "DOCKER_HOST": f"unix://{self._socket}",
        }

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._socket)) == 0

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A podman command, whatever its exit code is."""
        return subprocess.run(
            [*self._podman(), *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def run(self, *arguments: str) -> str:
        """A podman command that succeeds; its output."""
        done = self.attempt(*arguments)
        assert done.returncode == 0, f"podman {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def compose(self, file: Path, *arguments: str) -> str:
        """A docker-compose command that succeeds; its output."""
        done = subprocess.run(
            ["docker-compose", "-p", file.stem, "-f", str(file), *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"docker-compose {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def logs(self, container: str) -> str:
        done = self.attempt("logs", container)
        return done.stdout + done.stderr

    def is_healthy(self, container: str) -> bool:
        """The result of the container's own health check, run now: systemd would run it in
        intervals."""
        return self.attempt("healthcheck", "run", container).returncode == 0
