"""Every command of every page is run: here, by another test, or it is an exception with its reason.

A page is run as its reader would: in one shell and one directory that looks like the clone, with
the ports of the page. For that it has a network and processes of its own (`unshare`), so nothing
is replaced but placeholders and directories of the machine. A new command of a page is run from the
day on which it is written; it fails here until it works or is listed.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.e2e.brokers import SOURCE

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200
"""For one page on a busy machine."""
UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
"""The machines of the examples."""
PROGRAMS = re.compile(
    r"(\$ )?(sudo )?(([A-Z_]+=\S* )*)(holdfast|pip|python3?|docker|kubectl|openssl|apt|curl|make"
    r"|mosquitto_\w+|kill|cp|scp|ssh|systemctl|install|promtool|git|head|mkdir|source|export) "
)
"""The first words of a block that is indented only, if it has commands."""
MACHINE = re.compile(r"(?<![\w.])/(var/lib|srv|etc/holdfast|etc/systemd|etc/sysusers|run|backup)\b")
SERVERS = re.compile(
    r"(\w+=\S* )*(holdfast (serve|cluster (local|watch)|federation (sidecar|manager serve)|top)"
    r"|python examples/sparkplug.py)\b"
)
"""The commands that a reader leaves running in a terminal of their own."""

PREAMBLE = """
set -eE
trap 'echo "FAILED: $BASH_COMMAND"' ERR
ip link set lo up
for address in ADDRESSES; do ip address add $address/32 dev lo; done
until_ready() { # [URL]: the job that was started last serves
  until curl -sf -o /dev/null "${1:-http://127.0.0.1:18083/readyz}"; do kill -0 $!; sleep 0.1; done
}
servers=()
alive() { for each in "${servers[@]}"; do kill -0 $each 2>/dev/null && echo $each; done | wc -l; }
broker() { holdfast serve --data ./data "$@" & until_ready; }
"""


@dataclass(frozen=True)
class Page:
    before: str = ""
    """Shell before the page's first command: what its reader has at that point."""
    insert: tuple[tuple[str, str], ...] = ()
    """Shell before the command that begins so: what the reader does in between, or waits for."""
    replace: tuple[tuple[str, str], ...] = ()
    """Placeholders, and times that must be now."""
    after: str = ""
    shows: str = ""
    """A line that the reader sees."""
    ended: int = 0
    """How many of the servers that the page starts it also ends."""


NOW = datetime.now(UTC).isoformat()[:19] + "Z"
ANSWERS = "until curl -sf -o status http://127.0.0.1:18083/healthz; do kill -0 $!; sleep 0.1; done"
THREE_NODES = """
  for n in 2 3; do
    holdfast serve --node-id n$n --data ./m$n --bind 10.0.0.$n --admin 10.0.0.$n:18083 \\
      --peer-bind 10.0.0.$n:21883 --join 10.0.0.1:21883,10.0.0.2:21883,10.0.0.3:21883 \\
      --cluster-secret-file BASE/etc/holdfast/cluster.secret &
  done
"""
STORED = "broker; holdfast pub -t plant/line1/power -q 1 -m 21; "

RUN = {
    "docs/backup.md": Page(
        before="""
            mkdir -p BASE/backup; holdfast serve --data BASE/var/lib/holdfast & until_ready
            holdfast pub -t a -q 1 -m hello
            until holdfast log dump BASE/var/lib/holdfast | grep hello; do sleep 0.1; done
        """,
        replace=(
            ("2026-01-31T12:00:00Z", NOW),
            ("--data DIR", "--data BASE/var/lib/holdfast-restored"),
        ),
        after="holdfast log dump BASE/var/lib/holdfast-restored | grep hello",
    ),
    "docs/bench.md": Page(
        before="broker",
        # 3: this machine was too busy to measure the broker.
        replace=(("--size 100", "--size 100 --duration 1 || [ $? = 3 ]"),),
    ),
    "docs/cluster.md": Page(
        before="mkdir -p BASE/etc/holdfast",
        insert=(
            # First three nodes on one machine; then, in place of them, one of three machines.
            ("openssl", "kill $(jobs -p); wait || true; unset HOLDFAST_CLUSTER__SECRET_FILE"),
            (
                "holdfast cluster init",
                f"[ ! -e BASE/etc/holdfast/cluster.secret ] || {{ {THREE_NODES}}}; {ANSWERS}",
            ),
            (
                "holdfast cluster status",
                "until holdfast cluster status >status; do sleep 0.1; done",
            ),
        ),
        shows="n2 removed\n",
        ended=3,
    ),
    "docs/failover.md": Page(),
    "docs/federator.md": Page(
        before="""
            mkdir -p BASE/etc/holdfast
            openssl rand -hex 32 >BASE/etc/holdfast/federation.secret
            chmod 600 BASE/etc/holdfast/federation.secret; broker
        """,
        insert=(
            (
                "holdfast federation status",
                "until holdfast federation status --admin 127.0.0.1:7884; do kill -0 $!; done",
            ),
        ),
    ),
    "docs/install.md": Page(replace=(("passwords meter", "passwords meter <<<secret"),)),
    "docs/lab.md": Page(),
    "docs/listeners.md": Page(
        before="""
            mkdir -p BASE/run/holdfast
            cat >broker.toml <<END
            node.data = "data"
            [[listeners]]
            socket = "BASE/run/holdfast/mqtt.sock"
END
            holdfast serve -c broker.toml & until_ready
        """,
    ),
    "docs/log-client.md": Page(before=STORED, after="test -s hour.arrows"),
    "docs/monitoring.md": Page(before=STORED),
    "docs/operating.md": Page(
        insert=(("holdfast serve -c", "until_ready; broker=$!"),),
        replace=(("PID", "$broker"), ("curl -X", "curl -f -X")),
    ),
    "docs/processes.md": Page(after="until_ready"),
    "docs/security.md": Page(
        before="mkdir -p BASE/var/lib/holdfast",
        insert=(
            (
                "mosquitto_ctrl -u admin -P secret dynsec createClient",
                """
            export HOLDFAST_SECURITY__DYNAMIC_SECURITY_FILE=BASE/var/lib/holdfast/users.json
            broker
                """,
            ),
        ),
        # mosquitto_ctrl asks for the password of the new client, twice.
        replace=(("users.json admin", "users.json admin <<<secret"),),
        after="grep alice BASE/var/lib/holdfast/users.json",
    ),
    "docs/shared-storage.md": Page(
        before="""
            for n in 1 2; do
              holdfast serve --data BASE/srv/holdfast --standby --id $n -p 188$n \
                --admin 127.0.0.1:1808$n &
            done
            until holdfast cluster status --json --data BASE/srv/holdfast | grep '"holder": {' &&
              holdfast cluster status --data BASE/srv/holdfast | grep standby; do sleep 0.1; done
        """,
    ),
    "docs/sparkplug.md": Page(
        insert=(("python examples/sparkplug.py host", "until_ready"),),
        after="kill -0 $!",
    ),
    "docs/start.md": Page(
        insert=(
            ("holdfast sub -t 'greetings/#' -q 1 -C 1", "until_ready"),
            # The broker of another user of the machine lives on.
            ("kill -9", "holdfast serve --data ./other -p 1999 --admin off & other=$!"),
            ("holdfast sub -t 'greetings/#' -q 1 --last", "wait ${servers[0]} || true; broker"),
            ("holdfast cluster local", "kill -0 $other"),
            ("holdfast cluster watch", "until_ready http://127.0.0.1:2985/readyz"),
        ),
        shows="greetings/cluster hello\n",
        ended=1,
    ),
    "docs/testing.md": Page(),
    "docs/topology.md": Page(
        insert=(
            ("curl", "until curl -s -o api localhost:8080/; do kill -0 $!; sleep 0.1; done"),
            (
                "holdfast federation manager links",
                """
            for n in b c d; do
              curl -sf localhost:8080/api/v1/join -d '{"ip": "tcp://broker-'$n':1883"}'
            done
                """,
            ),
        ),
        # Graphviz.
        replace=(("neato -Tsvg", "grep graph"),),
    ),
    **{
        f"deploy/compose/{name}.yml": Page(
            replace=(("passwords meter", "passwords meter <<<secret"),)
        )
        for name in ("single", "pair", "cluster", "pipeline")
    },
    "deploy/federation/docker-compose.yml": Page(),
}

README = "tests/e2e/test_readme.py::"
ADMIN = "tests/e2e/test_admin_documented.py::test_the_commands_of_the_pages"
INSTALL = "tests/e2e/test_install.py::test_each_way_to_install"
PACKAGES = "tests/e2e/test_packages.py::"
SYSTEMD = "needs systemd; tests/e2e/test_packages.py::test_the_unit_of_the_debian_package"
RESIZE = "tests/e2e/test_cluster_resize.py::test_one_broker_grows_to_three_nodes_and_is_one_again"
HOURS = "measures for minutes to hours"
LINT = "checks the whole tree: make lint, make tidy"
JAVA_HOME = "the pipeline's own session does it; tests/spark"
SKIPPED: dict[str, dict[str, str]] = {
    "*": {
        "docker ": "needs Docker; tests/unit/deploy/test_compose.py",
        "kubectl ": "needs Kubernetes",
        "helm install ": "needs Kubernetes and Helm",
        "make ": "runs everything",
        "pip install '.[": f"downloads hundreds of megabytes; {INSTALL}",
        "python3 -m venv ": INSTALL,
        "holdfast pipeline ": "needs Java and Spark, half a minute for each command; tests/spark",
        "holdfast lab run ": HOURS,
    },
    "CONTRIBUTING.md": {
        "git clone ": "needs a repository elsewhere",
        "HOLDFAST_COMPILE=0 .venv/bin/pip install -e ": INSTALL,
        ".venv/bin/holdfast --version": INSTALL,
        "HOLDFAST_INTERPRETED=1 .venv/bin/python -m pytest ": "is make test",
        ".venv/bin/ruff ": LINT,
        ".venv/bin/mypy": LINT,
        ".venv/bin/python tools/tidy.py": LINT,
        ".venv/bin/python tools/formats.py": "make release",
        ".venv/bin/python tools/release.py ": "tests/unit/tools/test_release.py::test_a_release",
        "git commit ": "changes the clone",
    },
    "README.md": {
        "holdfast serve": README + "test_the_five_minutes",
        "holdfast sub -t 'greetings/#' -q 1 -C 1": README + "test_the_five_minutes",
        "holdfast pub -t greetings/world": README + "test_the_five_minutes",
        "holdfast sub -t 'greetings/#' -q 1 --last": README + "test_the_past",
        "mosquitto_sub ": README + "test_the_past",
        "holdfast cluster ": README + "test_the_cluster_for_trying",
        "holdfast pub -p 2883": README + "test_the_cluster_for_trying",
        "holdfast sub -p 2885": README + "test_the_cluster_for_trying",
    },
    "docs/admin-api.md": dict.fromkeys(("holdfast ", "chmod ", "curl ", "printf "), ADMIN),
    "docs/admission.md": {"holdfast clients ": ADMIN},
    "docs/cluster.md": {
        "holdfast cluster local": README + "test_the_cluster_for_trying",
        "holdfast serve --data ./data ": RESIZE,
        "holdfast cluster resize": RESIZE,
        "holdfast cluster plan": "tests/e2e/test_cluster_zones.py",
        "python -m bench.cluster ": HOURS,
    },
    "docs/brokers.md": {"holdfast lab report ": "tests/e2e/test_lab.py"},
    "docs/experiments.md": {"holdfast lab report ": "tests/e2e/test_lab.py"},
    "docs/federation.md": dict.fromkeys(
        ("export ", "HOLDFAST_", "holdfast "), README + "test_the_federation"
    ),
    "docs/federator.md": {
        "holdfast federation sidecar --broker mqtt://n1": "needs three more machines",
    },
    "docs/federation-paper.md": {"python -m bench.paper": "tests/interop/test_paper_mosquitto.py"},
    "docs/install.md": {
        "pip install dist": PACKAGES + "test_a_wheel",
        "pip install 'dist": PACKAGES + "test_a_wheel",
        "apt install": PACKAGES + "test_the_debian_package",
    },
    "docs/backup.md": {
        "holdfast restore --from-lake": "a bucket; test_restore_from_lake.py restores from a lake",
    },
    "docs/lab.md": {"holdfast lab report ": "needs a finished run; tests/e2e/test_lab.py"},
    "docs/listeners.md": {
        "mosquitto_pub -p 8883 --psk": "needs Python 3.13; tests/unit/security/test_psk.py"
    },
    "docs/operating.md": {"install ": SYSTEMD, "systemd-sysusers": SYSTEMD},
    "docs/pipeline.md": {
        **dict.fromkeys(("holdfast serve ", "python -c "), README + "test_a_home_becomes_tables"),
        "export SPARK_HOME": "tests/spark/test_distributed.py",
        "$SPARK_HOME/": "tests/spark/test_distributed.py",
        "export JAVA_HOME": JAVA_HOME,
        "spark-submit ": "tests/spark/test_distributed.py",
    },
    "docs/replay.md": dict.fromkeys(("mosquitto_", "holdfast "), README + "test_the_past"),
    "docs/scheduling.md": {
        "cp ": "needs systemd",
        "systemctl ": "needs systemd",
        "cd ": "tests/spark",
        "SPARK_CONF_DIR": "tests/spark",
        "export JAVA_HOME": JAVA_HOME,
    },
    "docs/shared-storage.md": {
        "holdfast serve": README + "test_the_pair",
        "holdfast pub": README + "test_the_pair",
        "holdfast cluster status --data ./shared": README + "test_the_pair",
        "holdfast cluster handover --data ./shared": README + "test_the_pair",
    },
    "docs/upgrade.md": {
        "holdfast cluster adopt": "tests/e2e/test_cluster_adoption.py::"
        "test_clients_after_an_adoption",
    },
    "docs/topology.md": {
        "HOLDFAST_TOPOLOGY__CERTIFICATE": "needs certificates",
        "holdfast federation manager nodes --url https": "needs certificates",
        "holdfast federation sidecar": "needs certificates",
    },
}
"""Commands that are not run here, by page and beginning: the test that runs them, or the reason."""


def blocks(text: str) -> Iterator[list[str]]:
    """The blocks of commands: ```sh, ```console, and others with a line that starts a program."""
    language, lines, previous = "", list[str](), ""
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = re.match(r" *```(\w*)", line)
        if fence or (not fenced and lines and not line.startswith("    ")):
            if lines and (language in ("sh", "console") or any(map(PROGRAMS.match, lines))):
                yield lines
            lines = []
            if fence:
                fenced = not fenced
                language = fence[1] if fenced else ""
        elif fenced:
            lines.append(line)
        elif line.startswith("    ") and (lines or not previous):
            lines.append(line[4:])
        previous = line


def commands(lines: list[str]) -> Iterator[str]:
    """The commands of a block: without comments and output, and with continued lines joined."""
    console = lines[0].startswith("$ ")
    joined = "\n".join(lines).replace("\\\n", " ")
    if not console:
        # Indented: a command goes on where the next line is indented further.
        joined = re.sub(r"\n  +(?=\S)", " ", joined)
    for line in joined.splitlines():
        if console and not line.startswith("$ "):
            continue
        command = re.sub(r"(^|\s+)# .*$|\s{3,}#.*$", "", line.removeprefix("$ ")).strip()
        if command:
            yield re.sub(r"\s+", " ", command)


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    headers = [*(ROOT / "deploy").rglob("*.yml"), *(ROOT / "deploy").rglob("*.md")]
    names = {str(each.relative_to(ROOT)) for each in (*found, *headers)}
    return sorted(names - {"CHANGELOG.md"})


def commands_of(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    if page.endswith(".yml"):
        found = re.findall(r"^#   (\S.*)$", text, re.MULTILINE)
        return [command for each in [found] if each for command in commands(each)]
    return [command for block in blocks(text) for command in commands(block)]


def reason(page: str, command: str) -> str | None:
    """Why a command is not run here. A name of a test is where it is run."""
    for start, why in {**SKIPPED.get(page, {}), **SKIPPED["*"]}.items():
        if command.startswith(start):
            return why
    return None


def script(name: str, base: Path) -> str:
    page = RUN[name]
    lines = [PREAMBLE.replace("ADDRESSES", " ".join(ADDRESSES)), page.before]
    for command in commands_of(name):
        if reason(name, command) is not None:
            continue
        for start, between in page.insert:
            if command.startswith(start):
                lines.append(between)
        for text, other in page.replace:
            command = command.replace(text, other)
        command = MACHINE.sub(rf"{base}/\1", command)
        lines.append(f"echo RUN {shlex.quote(command)}")
        if SERVERS.match(command) and "--check-config" not in command and "--once" not in command:
            command = command.removesuffix("&") + "& servers+=($!)"
        lines.append(command)
    end = f"(( $(alive) == ${{#servers[@]}} - {page.ended} ))"
    return "\n".join([*lines, page.after, end]).replace("BASE", str(base))


def clone(at: Path) -> Path:
    """A directory with the files of the clone, in which the commands leave theirs."""
    at.mkdir()
    for each in ROOT.iterdir():
        if each.name not in ("build", "dist", "data", ".git", ".venv"):
            (at / each.name).symlink_to(each)
    (at / ".venv").symlink_to(sys.prefix)
    binaries = at.parent / "bin"
    binaries.mkdir()
    for name, command in {
        "holdfast": f"{sys.executable} -m holdfast.cli.main",
        "python": sys.executable,
    }.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o755)
    return at


@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of(name: str, tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace")
    here = clone(tmp_path / "clone")
    path = f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # The path of a Unix socket is short.
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as base,
        (tmp_path / "output").open("w") as output,
    ):
        # The end of the shell ends all that it has started: they are in its process namespace.
        done = subprocess.run(
            ["timeout", str(TIMEOUT_S), *UNSHARE, "bash", "-c", script(name, Path(base))],
            cwd=here,
            env={"PATH": path, "PYTHONPATH": f"{SOURCE}:{ROOT}", "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = (tmp_path / "output").read_text()
    assert done.returncode == 0, text[-3000:]
    assert f"\n{RUN[name].shows}" in text, text[-3000:]


@pytest.mark.parametrize("name", pages())
def test_every_command_is_run(name: str) -> None:
    commands = commands_of(name)
    for command in commands:
        assert name in RUN or reason(name, command), f"{name}: no test runs {command}"
    page = RUN.get(name, Page())
    for start in (*SKIPPED.get(name, {}), *(start for start, _ in page.insert)):
        assert any(each.startswith(start) for each in commands), f"{name} has no {start}"
    for text, _ in page.replace:
        assert any(text in each for each in commands), f"{name} has no {text}"


def test_exceptions_name_tests_that_are_there() -> None:
    for page, exceptions in SKIPPED.items():
        assert page == "*" or (ROOT / page).is_file()
        for why in exceptions.values():
            for file, _, test in re.findall(r"(tests/[\w./]+)(::(\w+))?", why):
                assert (ROOT / file).exists(), file
                assert not test or f"def {test}(" in (ROOT / file).read_text(), why


def test_what_a_command_is() -> None:
    text = """
Words, and `holdfast inline`.

    holdfast serve --data d \\
      -p 1883    # the port
    holdfast: an output without a program

    peers = words only

```sh
echo '# kept'  # left out
```
"""
    found = [command for block in blocks(text) for command in commands(block)]
    assert found == [
        "holdfast serve --data d -p 1883",
        "holdfast: an output without a program",
        "echo '# kept'",
    ]
