"""The archive of Spark's classes: which Java options it adds, and what is kept."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from holdfast_lake import class_archive
from holdfast_lake.class_archive import OPTIONS, archive_path, make_archive, use_archive
from holdfast_lake.java import JavaError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A JAVA_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(OPTIONS, "")
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        """[ "$1" = -version ] && echo 'openjdk version "17.0.1"' >&2\n"""
        "exit 0\n"
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    return java.parent.parent


def test_options_are_added_to_those_of_the_user(home: Path) -> None:
    use_archive(home)
    assert os.environ[OPTIONS] == ""  # there is none
    archive_path(home).touch()
    os.environ[OPTIONS] = "-Dmine=1"
    use_archive(home)
    expected = f"-XX:SharedArchiveFile={archive_path(home)} -Xlog:cds*=off -Dmine=1"
    assert os.environ[OPTIONS] == expected
    use_archive(home)
    assert os.environ[OPTIONS] == expected


@pytest.mark.parametrize("own", ["-XX:SharedArchiveFile=a.jsa", "-XX:ArchiveClassesAtExit=a.jsa"])
def test_an_archive_of_the_user_is_kept(home: Path, own: str) -> None:
    archive_path(home).touch()
    os.environ[OPTIONS] = own
    use_archive(home)
    assert os.environ[OPTIONS] == own


def test_another_java_and_another_release_have_archives_of_their_own(home: Path) -> None:
    first = archive_path(home)
    (home / "release").write_text('JAVA_VERSION="17.0.2"')
    assert archive_path(home) != first


def writing(command: list[str], environment: dict[str, str]) -> None:
    """The run that makes an archive, in place of Java."""
    if command[-1] != "-version":
        assert command[1] == "-c"
        Path(environment[OPTIONS].partition("ArchiveClassesAtExit=")[2]).write_text("classes")


def test_the_newest_archives_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "_run", writing)
    folder = archive_path(home).parent
    for at in range(5):
        (folder / f"spark-{at}.jsa").touch()
        os.utime(folder / f"spark-{at}.jsa", (at, at))
    made = make_archive()
    names = {made.name, "spark-3.jsa", "spark-4.jsa"}
    assert {each.name for each in folder.iterdir()} == names
    assert made.read_text() == "classes"


def test_an_archive_that_java_cannot_map_is_not_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk has cut it. Java dies of SIGBUS."""

    def run(command: list[str], environment: dict[str, str]) -> None:
        writing(command, environment)
        if command[-1] == "-version":
            original(command, environment)

    original = class_archive._run
    monkeypatch.setattr(class_archive, "_run", run)
    (home / "bin" / "java").write_text(
        "#!/bin/sh\n"
        "case $1 in\n"
        """-version) echo 'openjdk version "17.0.1"' >&2;;\n"""
        "-XX:*) echo '# A fatal error'; kill -BUS $$;;\n"
        "esac\n"
    )
    with pytest.raises(JavaError, match="is the disk full"):
        make_archive()
    assert list(archive_path(home).parent.iterdir()) == []


def test_a_java_that_writes_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "_run", lambda command, environment: None)
    with pytest.raises(JavaError, match="wrote no archive"):
        make_archive()


def test_a_run_that_fails(home: Path) -> None:
    """Its last line is told."""
    (home / "bin" / "java").write_text(
        "#!/bin/sh\n"
        """[ "$1" = -version ] && { echo 'openjdk version "17.0.1"' >&2; exit 0; }\n"""
        "[ $1 = -Xshare:on ] && exit 0\n"
        "exit 3\n"
    )
    with pytest.raises(JavaError, match=r"could not be prepared: .*Java ended at its start"):
        make_archive()
