"""`holdfast cluster watch`: the changes of a cluster, one per line, until Ctrl-C.

When the requested node ends, the command continues with another node, whose admin address the last
status contained.
"""

import argparse
import json
import time
from datetime import datetime
from typing import Final

from holdfast.cli.cluster.http import AdminPort
from holdfast.cli.cluster.status import ClusterStatus, changes, verdict
from holdfast.client.admin_connection import AdminError

POLL_S: Final = 0.5
TIMEOUT_S: Final = 2.0
"""The time in seconds after which a node without a response counts as down."""


def watch(port: AdminPort, args: argparse.Namespace) -> int:
    """Runs the command until Ctrl-C."""
    try:
        ClusterWatch(port, args.json).run()
    except KeyboardInterrupt:
        pass
    return 0


class ClusterWatch:
    """Polls one node at a time and prints changes and new verdicts."""

    def __init__(self, port: AdminPort, as_json: bool) -> None:
        self._as_json = as_json
        self._port = port
        self._first = self._address = port.address
        self._others: list[str] = []
        """The admin addresses of the other nodes."""
        self._is_silent = False
        self._last: ClusterStatus | None = None

    def run(self) -> None:
        """Polls until interrupted. Raises `AdminError` if the first request fails.

        The first request has the time of any command, because there is no other node to ask yet.
        """
        self._take(self._port.status())
        while True:
            time.sleep(POLL_S)
            self._poll()

    def _poll(self) -> None:
        candidates = dict.fromkeys([self._address, self._first, *self._others])
        for address in candidates:
            try:
                status = self._port.sibling(address, TIMEOUT_S).status()
            except AdminError as error:
                if address == self._address and not self._is_silent:
                    self._print(str(error))
                continue
            if address != self._address:
                self._print(f"asking {status.node} at {address} now")
                self._address = address
            elif self._is_silent:
                self._print(f"{address} answers again")
            self._is_silent = False
            self._take(status)
            return
        self._is_silent = True

    def _take(self, status: ClusterStatus) -> None:
        last = self._last
        self._last = status
        self._others = [node.admin_address for node in status.nodes if node.admin_address]
        if last is not None:
            for line in changes(last, status):
                self._print(line)
        if last is None or verdict(last) != verdict(status):
            self._print(verdict(status).text)

    def _print(self, text: str) -> None:
        at = datetime.now().astimezone()
        if self._as_json:
            line = json.dumps({"time": at.isoformat(timespec="milliseconds"), "text": text})
        else:
            line = f"{at:%H:%M:%S}.{at.microsecond // 100_000} {text}"
        print(line, flush=True)
