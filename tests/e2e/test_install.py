"""`pip install .` as a user runs it: in a fresh environment, isolated, with any C compiler.

Compiling everything takes minutes. So the fast tests compile two modules. `make long` checks the
types of all hot modules in pip's isolated environment, and `make test-packages` compiles them all,
on each Python.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.test_packages import serving
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
TIMEOUT_S = 600
COMPILED = {f"{name}{SUFFIX}" for name in ("reasons", "durations", "holdfast__mypyc")}
INTERPRETED = "holdfast: the hot modules stay interpreted: "

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None
    or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    reason="needs a C compiler and the Python headers",
)

COMPILERS = {
    "exits": "exit 1",
    "is killed": "kill -9 $$",
    "has no headers": 'exec gcc -nostdinc "$@"',
    "hangs": 'echo $$ >>"$(dirname "$0")/pids"; sleep 1000; exit 0',
    "fills the disk": 'ulimit -f 8; exec gcc "$@"',
    "writes garbage": 'for word; do [ "$last" != -o ] || echo garbage >"$word"; last=$word; done',
    "writes half of a library": 'gcc "$@" || exit 1; for word; do'
    ' [[ $last != -o || $word != *.so ]] || truncate -s 4096 "$word"; last=$word; done',
}
REASONS = {
    "writes garbage": "the compiled modules do not load",
    "writes half of a library": "the compiled modules do not load",
}


def copy_of_the_source(to: Path, hot: Sequence[str] = ()) -> Path:
    """A clone without what was built in it; with `hot`, only these modules are compiled."""
    no_builds = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", to / "src", ignore=no_builds)
    (to / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    shutil.copy(ROOT / "tools/mypyc.ini", to / "tools")
    if hot:
        setup = (to / "setup.py").read_text()
        short, changed = re.subn(r"HOT = \[.*?\n\]", f"HOT = {hot!r}", setup, flags=re.DOTALL)
        assert changed == 1
        (to / "setup.py").write_text(short)
    return to


def environment(**settings: str) -> dict[str, str]:
    """That of a user: no path to this source, and no setting of these tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    kept.pop("PYTHONPATH", None)
    return {**kept, "HOLDFAST_COMPILE_TIMEOUT_S": "1500", **settings}


def run(
    *command: str | Path, cwd: Path, timeout_s: float = TIMEOUT_S, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def fresh_environment(at: Path, python: str = sys.executable) -> Path:
    done = run(python, "-m", "venv", at, cwd=at.parent)
    assert done.returncode == 0, done.stdout
    return at / "bin"


def compiler(kind: str, directory: Path) -> str:
    path = directory / "cc"
    path.write_text(f"#!/bin/bash\n{COMPILERS[kind]}\n")
    path.chmod(0o755)
    return str(path)


def skip_without_an_index(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode and "No matching distribution found for setuptools" in done.stdout:
        pytest.skip("pip reaches no package index")


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_pip_install(tmp_path: Path) -> None:
    """The types of all hot modules are right with the packages that pip installs for the build: it
    is the compiler that fails, after mypyc."""
    bin_ = fresh_environment(tmp_path / "venv")
    source = copy_of_the_source(tmp_path / "source")
    done = run(bin_ / "pip", "install", "-v", ".", cwd=source, CC=compiler("exits", tmp_path))
    skip_without_an_index(done)
    assert done.returncode == 0, done.stdout[-5000:]
    assert INTERPRETED + "compiling them failed (exit code 1)\n" in done.stdout
    version = run(bin_ / "holdfast", "--version", cwd=tmp_path)
    assert "(interpreted, " in version.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("small") / "source"
    return copy_of_the_source(at, ["protocol/mqtt/reasons.py", "node/durations.py"])


def wheel(source: Path, out: Path, **settings: str) -> tuple[str, set[str]]:
    """The output of a build, and the names of the compiled modules in the wheel."""
    done = run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", out, cwd=source, **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    (built,) = out.glob("*.whl")
    names = {Path(name).name for name in zipfile.ZipFile(built).namelist()}
    assert "trie.py" in names
    compiled = {name for name in names if name.endswith(".so")}
    assert ("-none-any" in built.name) == (not compiled)
    return done.stdout, compiled


def test_a_compiler_that_works(small: Path, tmp_path: Path) -> None:
    # Of an older version whose list of hot modules was another.
    stale = small / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/holdfast"
    stale.mkdir(parents=True, exist_ok=True)
    (stale / f"stale{SUFFIX}").touch()
    output, compiled = wheel(small, tmp_path)
    assert compiled == COMPILED
    assert INTERPRETED not in output
    assert not list((small / "build").glob("compile-*"))


@pytest.mark.parametrize(
    "kind",
    [
        # Each compiles: here one whose modules do not load. One that fails is asked for below.
        each if each == "writes garbage" else pytest.param(each, marks=pytest.mark.long)
        for each in COMPILERS
        if each != "hangs"
    ],
)
def test_a_compiler_that(kind: str, small: Path, tmp_path: Path) -> None:
    output, compiled = wheel(small, tmp_path / "out", CC=compiler(kind, tmp_path))
    assert not compiled
    reason = REASONS.get(kind, "compiling them failed (exit code 1)")
    assert output.count(INTERPRETED) == 1
    assert INTERPRETED + reason in output
    assert not list((small / "build").glob("compile-*"))


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_a_compiler_that_hangs(small: Path, tmp_path: Path) -> None:
    # On a busy machine mypy takes longer than the first of them.
    for timeout_s in (4, 16, 64):
        out = tmp_path / str(timeout_s)
        hangs = {"CC": compiler("hangs", tmp_path), "HOLDFAST_COMPILE_TIMEOUT_S": str(timeout_s)}
        output, compiled = wheel(small, out, **hangs)
        assert not compiled
        assert INTERPRETED + f"compiling took longer than {timeout_s} s" in output
        assert not list((small / "build").glob("compile-*"))
        if (tmp_path / "pids").exists():
            break
    for process in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), signal.SIGCONT)


PROGRAMS = {
    "mypy is missing": "import sys; sys.modules['mypyc'] = None",
    "compiling them failed (exit code -6)": "import os, sys\n"
    "if 'HOLDFAST_COMPILES_INTO' in os.environ: os.abort()",
    "mypy rejects their types (exit code 3)": "import mypyc.build\n"
    "def reject(*a, **k): raise SystemExit(1)\n"
    "mypyc.build.mypycify = reject",
}


@pytest.mark.parametrize("reason", PROGRAMS)
def test_a_mypyc_that_fails(reason: str, small: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PROGRAMS[reason])
    output, compiled = wheel(small, tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert not compiled
    assert INTERPRETED + reason in output


def test_a_compilation_that_is_asked_for_fails(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        *(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", out),
        cwd=small,
        CC=compiler("exits", tmp_path),
        HOLDFAST_COMPILE="1",
    )
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last == "HOLDFAST_COMPILE=1, but compiling them failed (exit code 1)"
    assert not out.exists()


@pytest.mark.long
def test_an_editable_install(small: Path, tmp_path: Path) -> None:
    """A compiled module of an earlier build is preferred to the source, so it does not stay."""
    build = "import setuptools.build_meta as b, sys; b.build_editable(sys.argv[1])"

    def modules_after(**settings: str) -> set[str]:
        (small / f"src/holdfast/stale{SUFFIX}").touch()
        done = run(sys.executable, "-c", build, tmp_path, cwd=small, **settings)
        assert done.returncode == 0, done.stdout[-5000:]
        return {each.name for each in (small / "src").rglob("*.so")}

    assert modules_after() == COMPILED
    assert modules_after(CC=compiler("exits", tmp_path)) == set()


def pythons() -> dict[str, str]:
    """The interpreters of this machine by version. One of pyenv may be there and not be active."""
    found: dict[str, str] = {}
    of_pyenv = [str(each) for each in Path("~/.pyenv/versions").expanduser().glob("*/bin/python3")]
    for each in ["python3.11", "python3.12", "python3.13", "python3.14", *of_pyenv]:
        if shutil.which(each) is None:
            continue
        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        done = subprocess.run([each, "-c", code], capture_output=True, text=True)
        version, _, path = done.stdout.strip().partition(" ")
        if not done.returncode and version.startswith("3.") and int(version[2:]) >= 11:
            found.setdefault(version, path)
    return found


def use(bin_: Path, form: str, tmp_path: Path) -> None:
    assert f"({form}, " in run(bin_ / "holdfast", "--version", cwd=tmp_path).stdout
    port = free_port()
    serve = [str(bin_ / "holdfast"), "serve", "-p", str(port), "--admin", "off", "--data"]
    with serving([*serve, str(tmp_path / "data")], port):
        sub = ("sub", "-p", str(port), "-t", "x", "-q", "1", "--last", "1", "--until", "now")
        assert "first" in run(bin_ / "holdfast", *sub, cwd=tmp_path).stdout


PYTHONS = pythons() if "HOLDFAST_PACKAGES" in os.environ else {}
WAYS = [
    *((version, "sdist", "compiled") for version in PYTHONS),
    *((version, "clone", "interpreted") for version in PYTHONS),
    ("this", "clone", "compiled"),
    ("this", "clone", "editable"),
    ("this", "clone[spark]", "interpreted"),
]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif("HOLDFAST_PACKAGES" not in os.environ, reason="make test-packages")
@pytest.mark.parametrize(("version", "source", "form"), WAYS)
def test_each_way_to_install(version: str, source: str, form: str, tmp_path: Path) -> None:
    bin_ = fresh_environment(tmp_path / "venv", PYTHONS.get(version, sys.executable))
    what = str(copy_of_the_source(tmp_path / "source"))
    if source == "sdist":
        build = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
        done = run(sys.executable, "-c", build, tmp_path, cwd=Path(what))
        what = str(tmp_path / done.stdout.splitlines()[-1])
    elif source == "clone[spark]":
        what += "[spark]"
    settings = {"CC": "no-such-compiler"} if form == "interpreted" else {"HOLDFAST_COMPILE": "1"}
    words = ["-v", "-e", what] if form == "editable" else ["-v", what]
    done = run(bin_ / "pip", "install", *words, cwd=tmp_path, timeout_s=1700, **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    assert (INTERPRETED + "no-such-compiler is missing" in done.stdout) == (form == "interpreted")
    use(bin_, "interpreted" if form == "interpreted" else "compiled", tmp_path)
    if "spark" in source:
        done = run(bin_ / "python", "-c", "import pyspark, pyspark_holdfast", cwd=tmp_path)
        assert done.returncode == 0, done.stdout
