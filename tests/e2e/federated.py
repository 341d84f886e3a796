"""Brokers that are members of one federation, as processes under test."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.log.files.data_directory import open_to_read
from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.pair import wait_until
from tests.support.ports import free_port

HELLO_S = 0.2
"""A link that dies in silence is found out within 1.5 of them and some asks."""


class Member(Holdfast):
    def __init__(
        self,
        directory: Path,
        name: str,
        settings: dict[str, dict[str, Any]] | None = None,
        data: Path | None = None,
    ) -> None:
        (directory / name).mkdir(parents=True, exist_ok=True)
        tables = {key: dict(table) for key, table in (settings or {}).items()}
        self.name = name
        self.federation_port = free_port()
        tables["federation"] = {
            "listen": f"127.0.0.1:{self.federation_port}",
            "hello_s": HELLO_S,
            # Only the links of the test.
            "degree": 0,
            **tables.get("federation", {}),
        }
        super().__init__(directory / name, tables, data)

    def link_to(self, *others: "Member") -> None:
        peers = [f"127.0.0.1:{other.federation_port}" for other in others]
        self.settings["federation"]["peers"] = peers

    def serves(self) -> bool:
        try:
            return bool(json.loads(self.admin("/readyz")[1])["ready"])
        except OSError:
            return False

    def federation(self, topic: str = "") -> dict[str, Any]:
        """What the admin port says; empty while it does not answer."""
        try:
            code, body = self.admin("/api/v1/federation" + (f"?topic={topic}" if topic else ""))
        except OSError:
            return {}
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def is_linked(self, count: int) -> bool:
        links = self.federation().get("links", [])
        return sum(link["usable"] for link in links) == count

    def sends(self, *filters: str) -> bool:
        """Does it hand over what matches these to others?"""
        return set(filters) <= set(self.federation().get("edge", {}).get("export_filters", []))

    def await_sending(self, *filters: str) -> None:
        wait_until(lambda: self.sends(*filters), f"{self.name} sends {filters}")

    def _is_in_directory(self) -> bool:
        """Whether readers of the directory see everything that the member has committed."""
        ranges = json.loads(self.admin("/api/v1/log")[1])["ranges"]
        return open_to_read(self.data).read_checkpoint().offsets == [end for _, end in ranges]

    def stored(self, topic: str) -> list[int]:
        """Numbered payloads of the topic in its log, in order, while the member runs."""
        wait_until(self._is_in_directory, "the watermarks are written")
        done = subprocess.run(
            [
                *[sys.executable, "-m", "holdfast.cli.main", "log", "dump", str(self.data)],
                *["--json", "--kind", "message", "--topic", topic],
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        return [int(json.loads(text)["payload"]) for text in done.stdout.splitlines()]

    def await_interest(self, topic: str, members: int) -> None:
        """Until it knows that so many, itself included, want the topic."""
        wait_until(
            lambda: len(self.federation(topic)["mesh"]["members"]) == members,
            f"{self.name} knows of {members} that want {topic}",
        )

    def count(self, outcome: str) -> int:
        """Of messages between the broker and the federation."""
        number: int = self.federation()["edge"]["counts"].get(outcome, 0)
        return number


@contextmanager
def line(
    directory: Path, names: str = "abc", settings: dict[str, dict[str, Any]] | None = None
) -> Iterator[list[Member]]:
    """Members in a row, each linked with the next."""
    members = [Member(directory, name, settings) for name in names]
    for one, other in itertools.pairwise(members):
        one.link_to(other)
    with running(members):
        wait_until(
            lambda: all(each.federation().get("members") == len(names) for each in members),
            "everybody knows everybody",
        )
        yield members


@contextmanager
def running(members: list[Member], standbys: Sequence[Member] = ()) -> Iterator[None]:
    """`standbys` are started last, and need not serve."""
    everybody = [*members, *standbys]
    try:
        for member in members:
            member.start()
        for member in standbys:
            member.launch()
        yield
    except BaseException as error:
        for member in everybody:
            error.add_note(f"log of {member.name}:\n{member.log_text()[-3000:]}")
        raise
    finally:
        for member in everybody:
            member.kill()
    for member in everybody:
        assert "Traceback" not in member.log_text(), member.log_text()[-6000:]
