"""Receives the nodes' reports of their sessions, at the leader of the home partitions.

A new leader requests the reports because no record names the owner of some sessions. It requests
them again over each new link. A report is complete: it lists every session and every waiting
client of its node. It may name hundreds of thousands of sessions, so it comes in pieces
(`own_reports`), and each is processed in slices.

Invariants
- An open session that its node does not have is closed, unless a client waits for it at that node.
  Then the node receives the report request again until one of the two is over. Counter-example: the
  client disconnects, its request is withdrawn, and the session stays open for a node without it.
- A report ends only what its node became owner of before the first piece came. Counter-example: the
  node gets a session while the other pieces are on their way. None of them names it.
- A decision between two slices is one before the rest of the report came. It may give a session
  away that its node has reported. Of two nodes that have a session one must release it.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import BadFrame, decode_json
from holdfast.node.frames import OWNED_DECODER, CloseFrame
from holdfast.node.node_state import NodeState, Work
from holdfast.node.ownership.closings import CLOSE_STEPS
from holdfast.node.ownership.decisions import Decisions
from holdfast.node.ownership.owners import Owners
from holdfast.node.ownership.replies import HomeAnswers
from holdfast.node.session.session import Session
from holdfast.node.state.replicated import ReplicatedState

ASK_OWNED_AGAIN_S: Final = 1.0
"""The interval in seconds between report requests to a node that lacks an open session for which a
client waits there."""


class UnconfirmedSessions:
    """The open sessions that the coordinator does not close yet, although their node lacks them.

    The node receives the report request again until it has the session or no client waits.
    """

    def __init__(
        self,
        state: NodeState,
        replicated: ReplicatedState,
        answers: HomeAnswers,
        home: Callable[[str], int],
    ) -> None:
        self._state = state
        self._replicated = replicated
        self._answers = answers
        self._home = home
        # Per client id: the node and the epoch.
        self._sessions: dict[str, tuple[str, int]] = {}
        # The time of the next report request to those nodes.
        self._ask_at = 0.0

    def add(self, client_id: str, node: str, epoch: int) -> None:
        if not self._sessions:
            self._ask_at = self._state.now + ASK_OWNED_AGAIN_S
        self._sessions[client_id] = (node, epoch)

    def drop(self, client_id: str) -> None:
        self._sessions.pop(client_id, None)

    def stop_leading(self, partition: int) -> None:
        for client_id in list(self._sessions):
            if self._home(client_id) == partition:
                del self._sessions[client_id]

    def handle_timers(self) -> None:
        """Requests the due reports."""
        if not self._sessions or self._ask_at > self._state.now:
            return
        self._ask_at = self._state.now + ASK_OWNED_AGAIN_S
        asked: dict[str, set[int]] = {}
        for client_id, (node, epoch) in list(self._sessions.items()):
            session = self._replicated.state.sessions.get(client_id)
            if session is None or session.owner != node or session.epoch != epoch:
                del self._sessions[client_id]
            else:
                asked.setdefault(node, set()).add(self._home(client_id))
        for node, partitions in asked.items():
            self._answers.ask_owned([node], sorted(partitions))

    def timer(self) -> float:
        """Returns the time of the next report request."""
        return self._ask_at if self._sessions else float("inf")


FEATURE: Final = "report-pieces"
"""The feature of a node that accepts a report in several pieces. Another one closes what a piece
does not name."""


class _Report:
    """The part of a node's report for one home partition that is received and not yet processed.

    `number`: the event (`Owners`) of its first piece.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_complete = False
        # (client id, epoch, user) to take.
        self.rest: deque[tuple[str, int, str]] = deque()
        self.owned: set[str] = set()
        self.asking: set[str] = set()
        # The epochs of sessions that the node has released since it sent the report.
        self.released: dict[str, int] = {}
        # The recorded sessions of the node to compare with a complete report.
        self.recorded: list[Session] | None = None

    def __contains__(self, client_id: object) -> bool:
        """True if the report names the client."""
        return client_id in self.owned or client_id in self.asking


class SessionReports(Work):
    """The requests of a coordinator, and what it learns from each report."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        owners: Owners,
        decisions: Decisions,
        answers: HomeAnswers,
        *,
        forget_requests: Callable[[str, int, int, Container[str]], None],
        close: Callable[[Session], None],
    ) -> None:
        """`forget_requests` removes the requests of a node for sessions with a home partition that
        came before an event, except those of the given clients."""
        super().__init__()
        self._state = state
        self._context = context
        self._replicated = replicated
        self._owners = owners
        self._decisions = decisions
        self._answers = answers
        self._forget_requests = forget_requests
        self._close = close
        # Partitions for which the nodes must report their sessions.
        self.requested: set[int] = set()
        self._unconfirmed = UnconfirmedSessions(state, replicated, answers, replicated.home)
        # By node and home partition. `_due`: those that can be processed, in turn.
        self._reports: dict[tuple[str, int], _Report] = {}
        self._due: dict[tuple[str, int], None] = {}
        self.has_more = False

    def start_deciding(self, partition: int) -> None:
        """Requests the reports for `partition` at the end of the turn, and begins to process those
        that are here."""
        self.requested.add(partition)
        self._begin([key for key in self._reports if key[1] == partition])

    def stop_leading(self, partition: int) -> None:
        self.requested.discard(partition)
        self._unconfirmed.stop_leading(partition)
        self._drop([key for key in self._reports if key[1] == partition])

    def disconnected(self, node: str) -> None:
        """Drops what has come of the reports of a node. It reports again over the next link."""
        self._drop([key for key in self._reports if key[0] == node])

    def _drop(self, keys: list[tuple[str, int]]) -> None:
        for key in keys:
            del self._reports[key]
            self._due.pop(key, None)

    def request(self, node: str) -> None:
        """Requests the report of `node`. It may have reported before this node led."""
        decides = self._decisions.decides
        led = [each for each in range(len(self._context.leading)) if decides(each)]
        self._answers.ask_owned([node], led)

    def flush(self) -> None:
        """Requests the due reports from all connected nodes, at the end of a turn."""
        if self.requested:
            partitions = sorted(self.requested)
            self.requested.clear()
            self._answers.ask_owned(sorted(self._context.connected), partitions)

    def handle_owned(self, node: str, payload: bytes) -> None:
        """Receives a SESSION_OWNED frame: a node's report, or a request for the report of this
        node. Raises BadFrame when it is malformed."""
        found = decode_json(OWNED_DECODER, payload, "a SESSION_OWNED")
        partitions = found.partitions
        if not all(0 <= partition < len(self._context.leading) for partition in partitions):
            raise BadFrame("a partition that the cluster does not have")
        if found.ask:
            self._answers.asked_owned(node, partitions, found.epochs)
        else:
            self.receive(
                node,
                partitions,
                dict(found.owned),
                found.asking,
                found.users,
                is_first=not found.follows,
                is_last=not found.more,
            )

    def receive(
        self,
        node: str,
        partitions: list[int],
        owned: dict[str, int],
        asking: list[str],
        users: Mapping[str, str | None] | None = None,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        """Receives a piece of a node's report of all its sessions with these home partitions.

        `owned` maps each client to the epoch of its session. `asking` lists the clients that wait
        there for a session. `users` names the user of each session that belongs to one. A session
        that the report lacks is closed.
        """
        led = [each for each in partitions if self._context.leads(each)]
        if is_first:
            number = self._owners.next_number()
            for partition in led:
                self._reports[node, partition] = _Report(number)
        reports = {each: self._reports[node, each] for each in led if (node, each) in self._reports}
        home = self._replicated.home
        for client_id, epoch in owned.items():
            report = reports.get(home(client_id))
            if report is not None:
                user = "" if users is None else users.get(client_id) or ""
                report.rest.append((client_id, epoch, user))
                report.owned.add(client_id)
        for client_id in asking:
            report = reports.get(home(client_id))
            if report is not None:
                report.asking.add(client_id)
        for report in reports.values():
            report.is_complete = is_last
        self._begin([(node, partition) for partition in reports])

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        """Notes that a node has released a session that its report may name."""
        report = self._reports.get((node, self._replicated.home(client_id)))
        if report is not None:
            report.released[client_id] = epoch

    def _begin(self, keys: list[tuple[str, int]]) -> None:
        for key in keys:
            if self._decisions.decides(key[1]):
                self._due[key] = None
        is_idle = not self.has_more
        self.has_more = bool(self._due)
        if is_idle and self.has_more:
            self.step(self._state, self._state.steps_at_once)
            if self.has_more:
                self._state.start_work(self)

    def step(self, state: NodeState, steps: int) -> int:
        """Processes some of one report. The next slice is another one's."""
        left = steps
        while self._due and left > 0:
            key = next(iter(self._due))
            del self._due[key]
            if not self._decisions.decides(key[1]):
                # This node leads the partition again. `start_deciding` goes on.
                continue
            report = self._reports[key]
            left -= 1 + self._process(key, report, left)
            if report.rest or (report.is_complete and report.recorded != []):
                self._due[key] = None
            elif report.is_complete:
                del self._reports[key]
        self.has_more = bool(self._due)
        return steps - left

    def _process(self, key: tuple[str, int], report: _Report, steps: int) -> int:
        node, home = key
        done = 0
        while report.rest and done < steps:
            client_id, epoch, user = report.rest.popleft()
            done += 1
            if report.released.get(client_id, -1) < epoch:
                self._take(node, client_id, epoch, user)
        if report.rest or not report.is_complete:
            return done
        if report.recorded is None:
            for client_id in report.asking:
                self._owners.renew(node, client_id)
            self._owners.forget(node, home, report.number)
            self._forget_requests(node, home, report.number, report)
            report.recorded = self._replicated.open_sessions.of(node, home)
        while report.recorded and done < steps:
            done += self._compare(node, report, report.recorded.pop())
        return done

    def _take(self, node: str, client_id: str, epoch: int, user: str) -> None:
        older = self._owners.told(node, client_id, epoch, user)
        if older is not None:
            # The node could not be reached when the session was reassigned.
            self._answers.order_close(older[0], CloseFrame(client_id, older[1]))

    def _compare(self, node: str, report: _Report, session: Session) -> int:
        """Closes a recorded session that the report lacks. Returns the steps that it took."""
        client_id = session.client_id
        if (
            client_id in report.owned
            or session.owner != node
            or not self._replicated.open_sessions.has(session)
        ):
            return 1
        if client_id in report.asking:
            self._unconfirmed.add(client_id, node, session.epoch)
        elif not self._owners.is_named_since(report.number, node, client_id):
            self._unconfirmed.drop(client_id)
            self._close(session)
        return CLOSE_STEPS

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        for key, report in self._reports.items():
            home = key[1]
            assert self._context.leads(home), "a report to a node that does not lead"
            assert report.number <= self._owners.number, "a report of a later event"
            assert report.is_complete or report.recorded is None, "an incomplete report closes"
            is_ready = bool(report.rest) or report.is_complete
            is_due = key in self._due
            assert is_due or not is_ready or not self._decisions.decides(home), "a report is stuck"

    def handle_timers(self) -> None:
        self._unconfirmed.handle_timers()

    def timer(self) -> float:
        """Returns the time of the next report request to a node that lacks a session."""
        return self._unconfirmed.timer()
