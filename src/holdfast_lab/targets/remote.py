"""A broker that runs already, at an address."""

from typing import Final

from holdfast_lab.targets.target import Target, TargetError

LEVELS: Final = {"3.1.1": 4, "5": 5}
"""The protocol level of each version."""


class Remote(Target):
    """Any broker at `HOST:PORT`.

    `,pid=N` names its process here, for CPU and memory; `,mqtt=3.1.1` is for one without MQTT 5.
    """

    name = "remote"

    def __init__(self, text: str) -> None:
        """Raises `TargetError` for a text of another form."""
        address, *rest = text.split(",")
        host, _, port = address.rpartition(":")
        # A word without "=" has a value that is not allowed.
        more = {name: value if equals else "?" for name, equals, value in
                (each.partition("=") for each in rest)}  # fmt: skip
        pid, level = more.pop("pid", ""), more.pop("mqtt", "5")
        if (
            not host or not port.isdecimal() or more or level not in LEVELS
            or not (pid or "0").isdecimal()
        ):  # fmt: skip
            raise TargetError(
                f"target {text!r}: write HOST:PORT, and after it ,pid=N or ,mqtt=3.1.1"
            )
        self.title = address
        self.mqtt = LEVELS[level]
        self._server = address
        self._pids = [int(pid)] if pid else []

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [self._server]

    def start(self) -> None:
        """Does nothing: it runs."""

    def stop(self) -> None:
        """Does nothing: it is not ours."""

    def version(self) -> str:
        """Returns the program and its version."""
        return self.title

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return self._pids
