"""A broker that runs already, at an address."""

from holdfast_lab.targets.target import Target, TargetError


class Remote(Target):
    """Any broker at `HOST:PORT`; `,pid=N` names its process here, for CPU and memory."""

    name = "remote"

    def __init__(self, text: str) -> None:
        """Raises `TargetError` for a text of another form."""
        address, _, rest = text.partition(",")
        host, _, port = address.rpartition(":")
        key, _, pid = rest.partition("=")
        if not host or not port.isdecimal() or (rest and (key != "pid" or not pid.isdecimal())):
            raise TargetError(f"target {text!r}: write HOST:PORT or HOST:PORT,pid=N")
        self.title = address
        self._server = address
        self._pids = [int(pid)] if pid else []

    @property
    def servers(self) -> list[str]:
        """Return the addresses for clients."""
        return [self._server]

    def start(self) -> None:
        """Do nothing: it runs."""

    def stop(self) -> None:
        """Do nothing: it is not ours."""

    def version(self) -> str:
        """Return the program and its version."""
        return self.title

    def pids(self) -> list[int]:
        """Return the processes that are measured."""
        return self._pids
