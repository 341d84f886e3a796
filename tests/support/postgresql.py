"""A PostgreSQL server of the tests' own, on a free port of 127.0.0.1, or the reason why there is
none. Its files lie outside of pytest's directories, which it may not enter where root runs them."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.support.ports import free_port

START_S = 60.0
STOP_S = 30.0
PASSWORD = "word-of-the-database"
_USERS = ("postgres", "nobody")
"""Who runs it where root may not."""


@cache
def missing() -> str:
    """Why there can be no server here; empty: there can."""
    if _programs() is None:
        return "PostgreSQL is not installed (Debian: postgresql)"
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"psycopg: {error}"
    return ""


def _programs() -> Path | None:
    found = shutil.which("postgres")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in places if (each / "initdb").exists()), None)


class PostgresqlServer:
    def __init__(self) -> None:
        """Made, and not started."""
        programs = _programs()
        assert programs is not None, missing()
        self._programs = programs
        self._owner: dict[str, int | list[int]] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-postgresql-"))
        if os.geteuid() == 0:
            user = next(each for each in map(_user, _USERS) if each is not None)
            os.chown(self.directory, user.pw_uid, user.pw_gid)
            self._owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.port = free_port()
        self.log = self.directory / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        word = self.directory / "word"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        made = self._run(
            "initdb", "-D", "data", "-U", "holdfast", "-E", "UTF8", "--locale=C", "--no-sync",
            "-A", "scram-sha-256", f"--pwfile={word}",
        )  # fmt: skip
        assert made.returncode == 0, made.stderr.decode()

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.directory, capture_output=True, timeout=START_S, check=False,
            **self._owner,  # type: ignore[call-overload]
        )  # fmt: skip

    def start(self) -> None:
        """Returns when it takes connections. After a kill its processes may linger for a moment,
        and it is tried again."""
        deadline = time.monotonic() + START_S
        while not self._started(deadline):
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-4000:]

    def _started(self, deadline: float) -> bool:
        with self.log.open("ab") as log:
            # Processes are killed here, never the machine: what was written stays.
            self.process = subprocess.Popen(
                [
                    str(self._programs / "postgres"), "-D", "data", "-p", str(self.port),
                    "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
                    "-c", "fsync=off", "-c", "max_connections=50", "-c", "shared_buffers=16MB",
                ],
                cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                **self._owner,  # type: ignore[call-overload]
            )  # fmt: skip
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            if self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port)).returncode == 0:
                return True
            time.sleep(0.05)
        return False

    def kill(self) -> None:
        """SIGKILL; its children end by themselves when they notice."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str, password: str = PASSWORD, port: int = 0) -> str:
        return f"postgresql://holdfast:{password}@127.0.0.1:{port or self.port}/{database}"

    def new_database(self) -> str:
        """Its name."""
        self._databases += 1
        name = f"topology_{self._databases}"
        self.execute("postgres", f"CREATE DATABASE {name}")
        return name

    def execute(self, database: str, sql: str) -> list[tuple[object, ...]]:
        """With the manager's tables in reach."""
        import psycopg

        with psycopg.connect(
            self.url(database), autocommit=True, options="-c search_path=holdfast_topology"
        ) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description is not None else []


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


@contextmanager
def running_server() -> Iterator[PostgresqlServer]:
    server = PostgresqlServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()
