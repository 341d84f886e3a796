"""What `holdfast federation` prints."""

from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast_federation.cli.command import mesh_lines, status_lines


def status(**changes: Any) -> dict[str, Any]:
    return {
        "federation": "plants",
        "running": True,
        "failure": "",
        "id": "aa",
        "epoch": 3,
        "address": "10.0.0.1:7883",
        "members": 3,
        "links": [
            {"id": "bb", "remote": "10.0.0.2:7883", "rtt_ms": 1.25, "up_s": 61.2, "busy": False,
             "usable": True},
            {"id": "cc", "remote": "10.0.0.3:7883", "rtt_ms": None, "up_s": 0.1, "busy": False,
             "usable": False},
        ],
        "interest": {"local": 1, "remote": 2},
        "manager": None,
        "counters": {"refused": {}},
        "custody": {"messages": 7, "queued": {"cc": 7}, "disk_full": False},
        "edge": {"is_up": True, "counts": {"exported": 9, "imported": 4, "export not allowed": 2}},
    } | changes  # fmt: skip


def test_status_says_who_is_linked_and_what_waits() -> None:
    lines = status_lines(status())
    assert lines[0] == "member aa of plants, start 3, at 10.0.0.1:7883"
    assert lines[1] == "knows 3 members, itself included; announces 1 filter, others want 2 filters"
    assert lines[2] == "in custody 7 messages; handed over 9, taken in 4"
    assert "2 messages: export not allowed" in lines
    assert not any("manager" in line or "refused" in line for line in lines)
    text = "\n".join(lines)
    assert "bb    10.0.0.2:7883     1.2    61  up" in text
    assert "cc    10.0.0.3:7883       -     0  held down" in text
    assert "cc                7" in text


def test_status_says_what_is_wrong() -> None:
    custody = {"messages": 0, "queued": {}, "disk_full": True}
    edge = {"is_up": False, "counts": {}}
    lines = status_lines(status(links=[], custody=custody, edge=edge))
    assert "no links" in lines
    assert any("disk is full" in line for line in lines)
    assert any("session is not open" in line for line in lines)


def test_status_says_why_nobody_is_linked() -> None:
    manager = {"connected": False, "id": None, "url": "http://m:8080"}
    lines = status_lines(
        status(links=[], manager=manager, counters={"refused": {"secret_there": 3}})
    )
    assert "3 connections refused: secret there (the log says more)" in lines
    assert any("manager at http://m:8080 does not answer" in line for line in lines)
    lines = status_lines(status(manager={"connected": True, "id": 4, "url": "http://m:8080"}))
    assert "member 4 of the manager at http://m:8080" in lines


def test_a_mesh_is_a_tree_with_those_that_pass_on_in_brackets() -> None:
    mesh = {
        "topic": "t",
        "root": "a",
        "members": ["a", "c", "d", "lonely"],
        "parents": {"b": "a", "c": "b", "d": "a"},
        "children": {"a": ["b", "d"], "b": ["c"]},
    }
    assert mesh_lines(mesh, {}) == [
        "4 members want t",
        "a",
        "  (b)",
        "    c",
        "  d",
        "no way to lonely",
    ]
    one = {"topic": "t", "root": "a", "members": ["a"], "parents": {}, "children": {}}
    assert mesh_lines(one, {}) == ["1 member wants t", "a"]
    nobody = {"topic": "t", "root": None, "members": [], "parents": {}, "children": {}}
    assert mesh_lines(nobody, {}) == ["no member is subscribed to t"]


def test_a_broker_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federation", "status", "--admin", "127.0.0.1:1"]) == 1
    assert "nothing listens on 127.0.0.1:1" in capsys.readouterr().err
    assert main(["federation", "mesh", "t", "--admin", "nonsense"]) == 1
    assert "give ADDR:PORT" in capsys.readouterr().err


def test_sites_have_names_where_they_are_known() -> None:
    node, other = "a" * 32, "b" * 32
    links = [
        {"id": other, "name": "bergen", "remote": "x:1", "rtt_ms": None, "up_s": 1.0, "busy": False,
         "usable": True}
    ]  # fmt: skip
    custody = {"messages": 1, "queued": {"c" * 32: 1}, "disk_full": False}
    names = {node: "oslo", "c" * 32: "hamar"}
    lines = status_lines(status(id=node, names=names, links=links, custody=custody))
    text = "\n".join(lines)
    assert lines[0].startswith("member oslo (aaaaaaaa) of plants")
    assert "bergen (bbbbbbbb)" in text
    assert "hamar (cccccccc)" in text
    mesh = {"topic": "t", "root": node, "members": [node], "parents": {}, "children": {}}
    assert mesh_lines(mesh, names)[1] == "oslo (aaaaaaaa)"
