"""Run pytest, and what has failed once more, alone.

Tests of real processes share a machine of two cores with each other; one that waited too long for
its turn says nothing about the code. What fails alone as well fails the run. What passes alone is
listed as flaky, to be mended: a test must not depend on what runs beside it. Many failures are no
bad luck and are not tried again.

    python tools/run_tests.py NAME -n 4 tests -m "not spark"

NAME names the run, so that several runs do not mistake each other's failures for theirs. Each line
begins with it, because `make test` has three runs at a time. At the end come the files that took
the longest, in seconds of a worker; build/tests-NAME/junit.xml has the seconds of each test.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

FLAKY_MAX: Final = 5
FILES_SHOWN: Final = 12
TESTS_FAILED: Final = 1  # pytest's exit codes


def run(command: list[str], name: str) -> int:
    """Run a command, print each of its lines after `name`, and return its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line}", end="", flush=True)
    return process.returncode


def slowest_files(report: Path) -> list[str]:
    """Return seconds, tests and names of the files that took the longest, by pytest's report."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while len(parts) > 1 and parts[-1][:1].isupper():  # a class in the file
            parts.pop()
        seconds["/".join(parts)] += float(case.get("time", 0))
        tests["/".join(parts)] += 1
    return [f"{taken:6.1f} s {tests[file]:5} tests {file}.py"
            for file, taken in seconds.most_common(FILES_SHOWN)]  # fmt: skip


def main(name: str, arguments: list[str]) -> int:
    cache = Path("build") / f"tests-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache.absolute()}"]
    report = cache / "junit.xml"
    result = run([*pytest, f"--junitxml={report.absolute()}", *arguments], name)
    if report.exists():
        print(f"\n{name}: the longest files:", *slowest_files(report), sep="\n  ", flush=True)
    record = cache / "v" / "cache" / "lastfailed"
    if result != TESTS_FAILED or not record.exists():
        return result
    failed = sorted(json.loads(record.read_text()))
    if not failed or len(failed) > FLAKY_MAX or not all("::" in each for each in failed):
        return result  # without "::" it is a worker or a file that collected nothing
    print(
        f"\n{name}: {len(failed)} failed beside others; now alone:", *failed, sep="\n  ", flush=True
    )
    alone = run([*pytest, *arguments, "-n", "0", "--last-failed"], name)
    if alone == 0:
        print(f"\n{name}: FLAKY, passed alone, to be mended:", *failed, sep="\n  ", flush=True)
    return alone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
