"""Shares lock-outs and the use of rates and quotas among the processes of one machine.

Each process announces to the others, at most every REPORT_S, the authentications that failed there
and what its clients have taken from the allowances of clients, users and addresses. The others take
as much from theirs. So a name with connections at several processes has one allowance, and a
lock-out comes after as many failures as at one process.

Invariant: what is taken from an allowance here is taken from that of each connected sibling once,
REPORT_S later at most. Until then the processes together may accept more, by what the rates allow
in that time; the debt that it leaves slows the same clients down.
"""

from typing import Final

from msgspec import Struct, json

from holdfast.node.admission.checks import count_failure
from holdfast.node.admission.limits import LISTENER
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.features import SHARED_USAGE
from holdfast.node.frame_kinds import USAGE, decode_json
from holdfast.node.node_state import NodeState

REPORT_S: Final = 0.1
"""The least time in seconds between two reports."""
FAILURES_MAX: Final = 10_000
"""The most failures of one report. Further ones count at their process alone."""
PART_MAX: Final = 5_000
"""The most entries of one frame."""


class UsageReport(Struct):
    """The payload of a frame USAGE: (scope, name) of each failed authentication, and (scope, kind
    of allowance, name, amount)."""

    failures: list[tuple[str, str]]
    taken: list[tuple[str, str, str, float]]


USAGE_DECODER: Final = json.Decoder(UsageReport)


class SharedUsage:
    """The reports of this process, and what the others report."""

    def __init__(self, state: NodeState, context: ClusterContext, siblings: frozenset[str]) -> None:
        self._state = state
        self._context = context
        self.siblings = siblings
        """The nodes of the other processes of this machine."""
        self._report_at = 0.0
        state.admission.share()

    def timer(self) -> float:
        """The time of the next report."""
        admission = self._state.admission
        return self._report_at if admission.meters.charged or admission.reported else NEVER

    def step(self) -> None:
        """Reports to the other processes, if it is time."""
        now = self._state.now
        if self.timer() > now:
            return
        self._report_at = now + REPORT_S
        admission = self._state.admission
        failures, admission.reported = admission.reported[:FAILURES_MAX], []
        taken = [
            (scope, kind, name, amount)
            for (scope, kind, name), amount in admission.meters.take_charged()
            if scope != LISTENER
        ]
        nodes = [each for each in self.siblings if self._context.understands(each, SHARED_USAGE)]
        while failures or taken:
            frame = json.encode(UsageReport(failures[:PART_MAX], taken[:PART_MAX]))
            del failures[:PART_MAX], taken[:PART_MAX]
            for node in nodes:
                self._context.send(node, USAGE, frame)

    def handle(self, node: str, payload: bytes) -> None:
        """Takes a report. Raises `BadFrame` when it is malformed."""
        report = decode_json(USAGE_DECODER, payload, "a USAGE")
        if node not in self.siblings:
            return
        state = self._state
        for scope, name in report.failures:
            count_failure(state, scope, name)
        for scope, kind, name, amount in report.taken:
            state.admission.meters.debit((scope, kind, name), amount, state.now)
