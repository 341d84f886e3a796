"""The examples that run `holdfast pipeline` on a schedule: each command line is one that it takes.

Airflow is imported where it is installed. Elsewhere its file is read as code: the names that it
imports, and the tasks with their commands.
"""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.cli.main import build_parser

EXAMPLES = Path(__file__).parents[3] / "examples" / "schedule"
PROGRAM = "/usr/local/bin/holdfast"
SYSTEMD = ("holdfast-pipeline.service", "holdfast-pipeline-once.service")
TIMER = "holdfast-pipeline-once.timer"


def parse(command: str) -> str:
    """Parse a command line as the program does, and return its subcommand."""
    words = shlex.split(command.split(">")[0])
    assert words[0] in (PROGRAM, "holdfast")
    found: str = build_parser(["pipeline"]).parse_args(words[1:]).pipeline_command
    return found


def test_the_crontab() -> None:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    entries = [line.split(None, 5) for line in lines if re.match(r"[*\d]", line)]
    assert [parse(entry[5]) for entry in entries] == ["run", "status", "compact"]
    assert all(re.fullmatch(r"[*/\d,-]+", field) for entry in entries for field in entry[:5])
    assert not any("%" in entry[5] for entry in entries)  # cron would end the line there


def test_the_units(tmp_path: Path) -> None:
    for name in SYSTEMD:
        text = (EXAMPLES / name).read_text()
        commands = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        assert [parse(command) for command in commands] == ["run"]
        # The command must exist for the check of systemd.
        program = str(Path(sys.executable).with_name("holdfast"))
        (tmp_path / name).write_text(text.replace(PROGRAM, program))
    shutil.copy(EXAMPLES / TIMER, tmp_path)
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        units = [str(tmp_path / name) for name in (*SYSTEMD, TIMER)]
        done = subprocess.run(
            [analyze, "verify", *units], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_dag_of_airflow() -> None:
    source = (EXAMPLES / "airflow_dag.py").read_text()
    tree = ast.parse(source)
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported["DAG"] == "airflow.sdk"
    assert imported["BashOperator"] == "airflow.providers.standard.operators.bash"
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    commands = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BashOperator":
            words = {each.arg: each.value for each in node.keywords}
            text = eval(compile(ast.Expression(words["bash_command"]), "dag", "eval"), constants)
            commands[ast.literal_eval(words["task_id"])] = parse(text)
    assert commands == {"records": "run", "tables": "run", "lag": "status"}


@pytest.mark.skipif(find_spec("airflow") is None, reason="Airflow is not installed")
def test_the_dag_as_airflow_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(EXAMPLES / "airflow_dag.py")
    assert not bag.import_errors
    dag = bag.dags["holdfast_tables"]
    assert [each.task_id for each in dag.topological_sort()] == ["records", "tables", "lag"]
