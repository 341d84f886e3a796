"""Keeps the classes of Spark in an archive that Java maps at its start in place of loading them.

Loading and verifying 14,000 classes from 280 jars is more than half of the processor time of a
start. `holdfast pipeline prepare` makes the archive (class data sharing, "CDS") with a run of one
message. Java checks that the archive fits its version and each jar, and else starts without it.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pyspark

from holdfast_lake.java import JavaError, cache_directory, java_home

OPTIONS: Final = "SPARK_SUBMIT_OPTS"
"""The variable with Java options that spark-submit adds to those of the user."""
RUN_S: Final = 600.0
"""The most seconds that the run may take, with Java's writing of the archive."""
ARCHIVES_MAX: Final = 3
"""The most archives that are kept, the newest ones: one has up to 200 MB."""

_RUN: Final = """
import sys
from holdfast.cli.main import main
from holdfast.client.blocking import Client
from holdfast.testing import Broker
with Broker(admin=True) as broker:
    with Client(broker.host, broker.port) as client:
        client.publish("plant/a", b'{"temp":21.5}', qos=1)
    source = f"{broker.host}:{broker.admin_port}"
    code = main(["pipeline", "run", "all", "--from", source, "--lake", sys.argv[1]])
sys.exit(code)
"""
"""A run of the pipeline that makes each table from one message of a broker."""


def use_archive(home: Path) -> None:
    """Lets the Javas that this process starts use the archive, if there is one."""
    archive = archive_path(home)
    if archive.exists():
        files = ":".join(str(each) for each in (_base_path(archive), archive) if each.exists())
        # A log of another Spark, of an older Java, or of nothing: Java would warn at each start.
        _add_options(os.environ, f"-XX:SharedArchiveFile={files} -Xlog:cds*=off")


def archive_path(home: Path) -> Path:
    """Returns the path of the archive for this Java and this Spark."""
    java = (home / "bin" / "java").resolve()
    release = java.parent.parent / "release"
    parts = [str(java), pyspark.__version__, pyspark.__file__]
    parts += [release.read_text()] if release.exists() else []
    return cache_directory() / f"spark-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.jsa"


def has_archive() -> bool:
    """Whether there is an archive of some Spark. This starts no Java to find its version."""
    return any(cache_directory().glob("spark-*.jsa"))


def make_archive() -> Path:
    """Makes the archive, and returns its path. Raises JavaError."""
    home = java_home()
    archive = archive_path(home)
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="spark-") as folder:
        made = Path(folder) / "spark.jsa"
        _make_base(home, archive)
        environment = dict(os.environ)
        base = [_base_path(archive)] if _base_path(archive).exists() else []
        options = [f"-XX:SharedArchiveFile={each}" for each in base]
        _add_options(environment, " ".join([*options, f"-XX:ArchiveClassesAtExit={made}"]))
        _run([sys.executable, "-c", _RUN, f"{folder}/lake"], environment)
        if not made.exists():
            raise JavaError(f"the Java in {home} wrote no archive of its classes")
        _check(home, [*base, made])
        made.replace(archive)
    old = sorted(archive.parent.glob("spark-*.jsa"), key=lambda each: each.stat().st_mtime)
    for each in old[:-ARCHIVES_MAX]:
        each.unlink(missing_ok=True)
        _base_path(each).unlink(missing_ok=True)
    return archive


def _base_path(archive: Path) -> Path:
    """Returns the path of Java's own classes, for a Java without an archive of these."""
    return archive.with_name(archive.name.replace("spark-", "java-"))


def _make_base(home: Path, archive: Path) -> None:
    java = str(home / "bin" / "java")
    if subprocess.run(
        [java, "-Xshare:on", "-version"], capture_output=True, check=False
    ).returncode:
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix="java-") as folder:
            made = Path(folder) / "java.jsa"
            _run([java, "-Xshare:dump", f"-XX:SharedArchiveFile={made}"], dict(os.environ))
            made.replace(_base_path(archive))


def _check(home: Path, files: list[Path]) -> None:
    """Starts a Java with an archive, the last file, and makes it durable. Raises JavaError.

    Counter-example: the disk is full, and the archive is cut. Each Spark would die of SIGBUS.
    """
    folder = files[-1].parent
    crash = ["-XX:-CreateCoredumpOnCrash", f"-XX:ErrorFile={folder / 'crash.log'}"]
    archives = f"-XX:SharedArchiveFile={':'.join(map(str, files))}"
    try:
        _run([str(home / "bin" / "java"), archives, *crash, "-version"], dict(os.environ))
    except JavaError:
        text = f"Java cannot use the archive that it wrote to {folder.parent}: is the disk full?"
        raise JavaError(text) from None
    with files[-1].open("rb") as file:
        os.fsync(file.fileno())


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Runs a command, and waits for the Java that it leaves as well: that has the same output."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise JavaError(f"Java could not be prepared within {RUN_S:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise JavaError(f"Java could not be prepared: {lines[-1] if lines else command[0]}")


def _add_options(environment: "os._Environ[str] | dict[str, str]", options: str) -> None:
    """Adds Java options to those of the user, unless these choose an archive themselves."""
    given = environment.get(OPTIONS, "")
    if "SharedArchiveFile" not in given and "ArchiveClassesAtExit" not in given:
        environment[OPTIONS] = f"{options} {given}".strip()
