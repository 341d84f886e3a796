"""The runner of `make test` says which files took the longest, and runs failures once more."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[3] / "tools" / "run_tests.py"


def test_the_longest_files_come_last_and_failures_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import time\nclass TestOne:\n def test_waits(self): time.sleep(0.3)\n"
    )
    (tmp_path / "test_flaky.py").write_text(
        "from pathlib import Path\n"
        "def test_once():\n"
        " seen = Path('seen').exists()\n"
        " Path('seen').touch()\n"
        " assert seen\n"
        "def test_two(): pass\n"
    )
    command = [sys.executable, str(PROGRAM), "mine", "-n", "0", "test_slow.py", "test_flaky.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    begin = lines.index("mine: the longest files:")
    assert lines[begin + 1].split()[2:] == ["1", "tests", "test_slow.py"]
    assert float(lines[begin + 1].split()[0]) >= 0.3
    assert lines[begin + 2].split()[2:] == ["2", "tests", "test_flaky.py"]
    assert "mine: FLAKY, passed alone, to be mended:" in done.stdout
    assert (tmp_path / "build" / "tests-mine" / "junit.xml").exists()
