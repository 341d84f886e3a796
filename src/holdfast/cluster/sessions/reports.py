"""The nodes' reports of their sessions, as the leader of the home partitions receives them.

A new leader requests the reports because no record names the owner of some sessions. It requests
them again over each new link. A report is complete: it lists every session and every waiting
client of its node.

Invariant: an open session that its node does not have is closed, unless a client waits for it at
that node. Then the node receives the report request again until one of the two is over.
Counter-example: the client disconnects, its request is withdrawn, and the session stays open for a
node without it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import BadFrame, decode_json
from holdfast.cluster.frames import OWNED_DECODER, CloseFrame
from holdfast.cluster.sessions.decisions import Decisions
from holdfast.cluster.sessions.owners import Owners
from holdfast.cluster.sessions.replies import HomeAnswers
from holdfast.cluster.sessions.unconfirmed import UnconfirmedSessions
from holdfast.cluster.state.replicated import ReplicatedState


class SessionReports:
    """The report requests of a coordinator, and what it learns from each report."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        owners: Owners,
        decisions: Decisions,
        answers: HomeAnswers,
        *,
        forget_requests: Callable[[str, set[int], set[str]], None],
        close: Callable[[Session], None],
    ) -> None:
        """`forget_requests` removes the requests of a node for sessions with these home partitions,
        except those of the given clients."""
        self._context = context
        self._replicated = replicated
        self._owners = owners
        self._decisions = decisions
        self._answers = answers
        self._forget_requests = forget_requests
        self._close = close
        # Partitions for which the nodes must report their sessions.
        self._requested: set[int] = set()
        self._unconfirmed = UnconfirmedSessions(state, replicated, answers, owners.home)

    def start_deciding(self, partition: int) -> None:
        """Requests the reports for `partition` at the end of the turn."""
        self._requested.add(partition)

    def stop_leading(self, partition: int) -> None:
        self._requested.discard(partition)
        self._unconfirmed.stop_leading(partition)

    def request(self, node: str) -> None:
        """Requests the report of `node`. It may have reported before this node led."""
        decides = self._decisions.decides
        led = [each for each in range(len(self._context.leading)) if decides(each)]
        self._answers.ask_owned([node], led)

    def flush(self) -> None:
        """Requests the due reports from all connected nodes, at the end of a turn."""
        if self._requested:
            partitions = sorted(self._requested)
            self._requested.clear()
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
            self.receive(node, partitions, dict(found.owned), found.asking, found.users)

    def receive(
        self,
        node: str,
        partitions: list[int],
        owned: dict[str, int],
        asking: list[str],
        users: Mapping[str, str | None] | None = None,
    ) -> None:
        """Receives a node's report of all its sessions with these home partitions.

        `owned` maps each client to the epoch of its session. `asking` lists the clients that wait
        there for a session. `users` names the user of each session that belongs to one. A session
        that the report lacks is closed.
        """
        for partition in partitions:
            if partition in self._decisions.begins_at:
                again = partial(self.receive, node, [partition], owned, asking, users)
                self._decisions.postpone(partition, ("owned", node, 0), again)
        led = {partition for partition in partitions if self._decisions.decides(partition)}
        for client_id, epoch in owned.items():
            if self._owners.home(client_id) not in led:
                continue
            user = "" if users is None else users.get(client_id) or ""
            older = self._owners.told(node, client_id, epoch, user)
            if older is not None:
                # The node could not be reached when the session was reassigned.
                self._answers.order_close(older[0], CloseFrame(client_id, older[1]))
        known = {*owned, *asking}
        self._owners.forget(node, led, known)
        self._forget_requests(node, led, known)
        self._close_lacking(node, led, owned, asking)

    def _close_lacking(
        self, node: str, led: set[int], owned: dict[str, int], asking: list[str]
    ) -> None:
        """Closes the recorded sessions that the report of `node` lacks."""
        waiting = set(asking)
        for home in sorted(led):
            for session in self._replicated.open_sessions.of(node, home):
                client_id = session.client_id
                if client_id in owned:
                    continue
                if client_id in waiting:
                    self._unconfirmed.add(client_id, node, session.epoch)
                else:
                    self._unconfirmed.drop(client_id)
                    self._close(session)

    def handle_timers(self) -> None:
        self._unconfirmed.handle_timers()

    def timer(self) -> float:
        """Returns the time of the next report request to a node that lacks a session."""
        return self._unconfirmed.timer()
