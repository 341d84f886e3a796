"""Decides the owner of each session, at the leader of its home partition.

A node that has received a CONNECT requests the session here. The previous owner closes its
connection and appends what it knows of the session to the log. Then an `open` record with a higher
epoch makes the requesting node the owner, and it receives the session as the log defines it. Every
node ignores later records of a previous owner because of their lower epoch: the log itself is the
fence.

The leader also closes a session whose owner is down. It publishes the will and appends the end of a
session without a connection (`wills_and_expiry`).

Invariants
- An epoch of a session is given to one owner (`epochs`). A new leader may give an unrecorded
  session away before its node has reported it. Of two nodes that have a session one must release
  it.
- A session is opened for one request at a time; the next request waits.
- A node that had an unrecorded session confirms its release before another node gets it, or is
  ordered to release it then. An order that a lost link drops follows the node's next report.
- SESSION_OPENED is sent after the `open` record is committed and applied here, if there is one.
- A new leader decides nothing before it has applied what earlier leaders have appended. One of
  those records may contain a given epoch. Counter-example: it gives epoch 8 again, and two nodes
  own the session with equal epochs.
"""

from collections.abc import Callable, Container
from functools import partial
from typing import Final

from holdfast.log.record import Record
from holdfast.node import frames
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.frames import CloseFrame, OpenFrame, decode_frame
from holdfast.node.node_state import CallbackPromise, NodeState
from holdfast.node.ownership.closings import Closings
from holdfast.node.ownership.decisions import Decisions
from holdfast.node.ownership.owners import Owners
from holdfast.node.ownership.releases import Releases
from holdfast.node.ownership.replies import HomeAnswers
from holdfast.node.ownership.reports import SessionReports
from holdfast.node.ownership.requests import SessionRequest, SessionRequests
from holdfast.node.ownership.wills_and_expiry import Endings
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import SESSION_EXPIRY
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import open_record
from holdfast.node.state.state_records import append_change
from holdfast.node.sweep import Sweep

CALL_STEPS: Final = 10
"""The steps of one postponed call or request: it costs an appended record or a frame."""
OVERDUE_MAX: Final = 100
"""The most overdue requests that one check of the timers continues with. The next check is due at
once while there are more."""


class SessionCoordinator:
    """The decisions about the owners of all sessions whose home partition this node leads.

    A new leader rebuilds them from the replicated state and from the reports of the nodes.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        barriers: Barriers,
        changes_session: Callable[[int, str], bool],
    ) -> None:
        """`changes_session`: see `Admission`."""
        self._state = state
        self._context = context
        self._replicated = replicated
        self.owners = Owners(state, context, replicated, self._epochs_reserved)
        self.answers = HomeAnswers(context, replicated)
        self._requests = SessionRequests(state.config.partitions, replicated.home)
        self._calls: Sweep[Callable[[], None]] = Sweep(state)
        self._ownerless: Sweep[SessionRequest] = Sweep(state)
        self.decisions = Decisions(state, context, changes_session, replicated.home)
        self._closings = Closings(state, context, replicated, self.decisions)
        self.endings = Endings(
            state, replicated, barriers, self.decisions.decides, self.decisions.is_changing
        )
        self.reports = SessionReports(
            state,
            context,
            replicated,
            self.owners,
            self.decisions,
            self.answers,
            forget_requests=self._forget,
            close=self._closings.close,
        )
        self.releases = Releases(
            state, self._requests, self.owners, self.answers, barriers.reads, self._begin
        )

    def home(self, client_id: str) -> int:
        return self._replicated.home(client_id)

    def recorded_session(self, client_id: str) -> Session | None:
        return self._replicated.state.sessions.get(client_id)

    def load_packet_ids(self, session: Session) -> None:
        """Sets the QoS 2 packet ids of a live session that are stored and not released."""
        ids, client_id = self._replicated, session.client_id
        session.inbound = ids.inbound_ids(client_id) or None
        if session.inbound is not None:
            doubtful = ids.doubtful_ids(client_id, self._context.generation)
            if doubtful is not None:
                session.own_rare().doubtful = doubtful

    def open(self, node: str, frame: OpenFrame) -> None:
        """Queues the request of `node` for a session, or withdraws it."""
        request = SessionRequest(node, frame)
        home = self.home(request.client_id)
        if not self._context.leads(home):
            # The node repeats its request once it knows the leader.
            return
        if home in self.decisions.begins_at:
            self.decisions.postpone(
                home, ("open", node, request.number), partial(self.open, node, frame)
            )
            return
        if frame.gone:
            self._withdraw(request)
            return
        request.came_after = self.owners.number
        if self._requests.find(request) is None and self._requests.add(request):
            self._begin(request)

    def epoch_at_once(self, client_id: str) -> int:
        """Returns the epoch of a session without a record that begins here in this step, or 0 if it
        has to wait: for an owner, a record or a reservation of epochs."""
        home = self.home(client_id)
        if (
            client_id in self._replicated.state.sessions
            or not self.decisions.decides(home)
            or self._requests.first(client_id) is not None
            or self.owners.owner(client_id) is not None
            or self.decisions.is_changing(client_id)
        ):
            return 0
        return self.owners.reserved_epoch(client_id, home)

    def _withdraw(self, request: SessionRequest) -> None:
        """Removes the request of a client that has disconnected.

        If the session is already open, the requesting node closes it. Otherwise nothing is opened,
        because the client may have connected elsewhere or left another will.
        """
        queued = self._requests.find(request)
        if queued is not None:
            if queued.is_opening:
                # The reply is sent when the `open` record is committed.
                return
            request = queued
        if not self._was_answered(request):
            self._requests.remove_waiting(request)
            self._opened(request, 0, False, is_lost=True)

    def _begin(self, request: SessionRequest) -> None:
        if self._was_answered(request):
            return
        user = self.owners.user(request.client_id)
        if request.user is not None and user and user != request.user:
            self.answers.refuse(request, denied=True)
            self._done(request)
            return
        owner = self.owners.owner(request.client_id)
        if owner is None:
            request.waits_for = ""
            self._open(request)
        elif self._context.is_gone(owner.node):
            self._go_without(request)
        else:
            self.releases.begin(request, owner)

    def _was_answered(self, request: SessionRequest) -> bool:
        """Replies to a repeated request, and returns True if it was one.

        The request is already served, or its session was closed meanwhile because its node seemed
        down.
        """
        client_id = request.client_id
        image = self._replicated.state.sessions.get(client_id)
        requests = self._replicated.requests(client_id)
        if request.number in requests:
            epoch, life = (0, 0) if image is None else (image.epoch, image.life)
            is_newest = request.number == requests[-1]
            is_lost = image is None or image.owner != request.node or not is_newest
            self._opened(request, epoch, not is_lost and life < epoch, is_lost=is_lost)
            return True
        epoch = self.owners.unrecorded_epoch(client_id, request.number)
        if epoch >= 0 and not request.recorded:
            self._opened(request, epoch, False)
            return True
        return False

    def handle_closed(self, node: str, payload: bytes) -> None:
        frame = decode_frame(frames.CLOSE, payload)
        if frame.kept is None:
            self.closed(node, frame.client, frame.epoch)
        else:
            self.kept(node, frame.client, frame.kept)

    def kept(self, node: str, client_id: str, filters: list[str]) -> None:
        """Ends the request for a session that `node` keeps because of these filters."""
        request = self.releases.kept(node, client_id, filters)
        if request is not None:
            self._done(request)

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        """Marks the session as released by `node`. The records that the node appended for it came
        before."""
        home = self.home(client_id)
        if home in self.decisions.begins_at:
            again = partial(self.closed, node, client_id, epoch)
            self.decisions.postpone(home, ("closed", client_id, epoch), again)
            return
        self.owners.closed(node, client_id, epoch)
        self._closings.released(node, client_id, epoch)
        self.reports.closed(node, client_id, epoch)
        request = self._requests.first(client_id)
        if request is not None and request.waits_for == node:
            # If the session is recorded, its `close` record has been appended and will be applied.
            self._go_on(client_id)

    def _go_without(self, request: SessionRequest) -> None:
        """Opens the session although the previous owner has not released it."""
        request.waits_for = ""
        image = self._replicated.state.sessions.get(request.client_id)
        if image is not None and image.owner:
            # `applied` opens the session once the `close` record is applied.
            self._closings.close(image)
        else:
            self._open(request)

    def _go_on(self, client_id: str) -> None:
        """Opens the session for the first request of the client if it has no owner any more."""
        request = self._requests.first(client_id)
        if request is None or request.is_opening:
            return
        image = self._replicated.state.sessions.get(client_id)
        if image is None or not image.owner:
            request.waits_for = ""
            self._open(request)

    def _open(self, request: SessionRequest) -> None:
        """Gives a session that no record gives to another node to the node of `request`."""
        client_id = request.client_id
        if self.decisions.is_changing(client_id):
            return
        image = self._replicated.state.sessions.get(client_id)
        if image is not None:
            # After a start a session may have no timer yet. One that has expired ends first, and
            # `applied` goes on with the request.
            is_over = not image.owner and (
                self.endings.is_ending(client_id) or not self._replicated.arm_timers(image)
            )
            if is_over and self.endings.due(image, SESSION_EXPIRY):
                return
            if self.endings.will_comes_first(image, request.clean_start):
                return
        epoch = self.owners.next_epoch(request, image)
        if epoch == 0:
            return
        owner = self.owners.owner(client_id)
        if owner is not None and owner.node != request.node and not owner.recorded:
            # The node may be down and alive, late, or have reported it while the request waited.
            self.answers.order_close(owner.node, CloseFrame(client_id, owner.epoch))
        self.owners.give(request, epoch)
        if image is None and not request.recorded:
            self._opened(request, epoch, False)
            return
        session = Session(client_id)
        session.epoch = epoch
        session.expiry_s = request.expiry_s
        session.username = request.username
        session.is_owned = bool(request.user)
        session.will = request.will
        request.is_opening = True
        opened = open_record(session, request.clean_start, request.node, request.number)
        opened.generation = self._context.generation
        promise = CallbackPromise(partial(self._open_appended, request, epoch))
        append_change(self._state, session.key, opened, epoch, promise)

    def _epochs_reserved(self, client_id: str, goes_on: bool) -> None:
        """Begins a request again that has waited for its epoch, or drops it."""
        request = self._requests.first(client_id)
        if request is None or request.is_opening or request.waits_for:
            return
        if goes_on and self.decisions.decides_for(client_id):
            self._begin(request)
        else:
            self._done(request)

    def _open_appended(self, request: SessionRequest, epoch: int, error: str) -> None:
        """Replies to the request now that its `open` record is applied, which says whether the
        session was there. [MQTT-3.2.2-2] [MQTT-3.2.2-3]

        `error`: the record is refused, because this node leads no more.
        """
        image = self.recorded_session(request.client_id)
        if error or image is None or image.owner != request.node or image.epoch != epoch:
            # Or a later record, perhaps of another leader, has changed the owner. The node repeats
            # its request.
            self._done(request)
        elif request.is_orphan:
            # The process that requested the session has ended, so no client uses the session.
            self._closings.close(image)
            self._done(request)
        else:
            self._opened(request, epoch, image.life < epoch)

    def will_applied(self, record: Record) -> None:
        """Continues with the end or the opening of a session whose will is now in the log."""
        client_id = record.client_id.decode()
        if self.decisions.decides_for(client_id):
            self.endings.will_applied(client_id, record.sequence)
            self._go_on(client_id)

    def _opened(
        self, request: SessionRequest, epoch: int, present: bool, *, is_lost: bool = False
    ) -> None:
        """Sends the reply to a request. `is_lost`: the session was closed again and its will
        published."""
        self.answers.opened(request, epoch, present, is_lost)
        self._done(request)

    def _done(self, request: SessionRequest) -> None:
        """Removes a served request and begins the next one of the client."""
        self.releases.forget(request)
        following = self._requests.remove_first(request)
        if following is not None:
            self._begin(following)

    def connected(self, node: str) -> None:
        """Repeats close orders to `node`, which may have missed one, and requests its report."""
        self.releases.repeat(node)
        self.reports.request(node)

    def _forget(self, node: str, home: int, number: int, known: Container[str]) -> None:
        """Removes requests that `node` does not know: an earlier process of the node sent them.
        Those that came after the event `number` stay."""
        # The newest first, so that none begins when the one in front of it is removed.
        for request in reversed(self._requests.of_node(node, home)):
            if request.client_id in known or request.came_after >= number:
                continue
            if request.is_opening:
                request.is_orphan = True
            else:
                self._requests.remove_waiting(request)
                self._done(request)

    def disconnected(self, node: str) -> None:
        """Forgets the unrecorded sessions of a node that is down and whose link has ended, and its
        incomplete reports."""
        self.reports.disconnected(node)
        if self._context.is_gone(node):
            self.owners.forget_node(node)

    def node_gone(self, node: str) -> None:
        """Closes the recorded sessions of a node that is down by the metadata.

        The unrecorded ones are forgotten until the node reports them again. This node has no link
        over which it would do so. Counter-example: it was cut off, leads again, and applies that it
        was down. Another node is given the session of a client that is connected here.
        """
        if node not in self._context.connected and node != self._context.node_id:
            self.owners.forget_node(node)
        self._closings.node_gone(node)
        waiting = [each for each in self._requests.firsts() if each.waits_for == node]
        self._ownerless.begin(waiting, self._go_without_gone)

    def _go_without_gone(self, request: SessionRequest) -> int:
        """Goes on with a request that still waits for a node that is still down."""
        is_served = self._requests.first(request.client_id) is request
        if is_served and request.waits_for and self._context.is_gone(request.waits_for):
            self._go_without(request)
        return CALL_STEPS

    def start_leading(self, partition: int) -> None:
        """Begins to coordinate the sessions of `partition`, once the log up to its present end is
        applied."""
        self.decisions.start_leading(partition)
        self.committed(partition)

    def committed(self, partition: int) -> None:
        """Begins to decide for `partition` if enough of it is applied."""
        if not self.decisions.is_ready(partition):
            return
        self._closings.start_deciding(partition)
        self.endings.start_deciding(partition)
        self._calls.begin(self.decisions.pop_postponed(partition), _call)
        self.reports.start_deciding(partition)

    def stop_leading(self, partition: int) -> None:
        """Drops everything of the partition. The nodes repeat their requests at the next leader."""
        self.decisions.stop_leading(partition)
        self._requests.stop_leading(partition)
        self.reports.stop_leading(partition)
        self.owners.stop_leading(partition)
        self.endings.stop_deciding(partition)
        self._closings.stop_leading(partition)

    def applied(self, record: Record) -> None:
        """Acts on an applied SESSION record.

        A session without a connection gets its timers for will and expiry. A waiting request
        continues.
        """
        client_id = record.client_id.decode()
        session = self._replicated.state.sessions.get(client_id)
        if session is None or session.owner:
            self.endings.forget(client_id)
        elif not self._replicated.arm_timers(session):
            self.endings.due(session, SESSION_EXPIRY)
        self._closings.applied(client_id)
        self.endings.applied(client_id)
        if self.decisions.decides(record.partition):
            self._go_on(client_id)

    def handle_timers(self) -> None:
        """Reassigns sessions whose owner's reply is overdue, and repeats report requests."""
        for _ in range(OVERDUE_MAX):
            if self._requests.timer() > self._state.now:
                break
            request = self._requests.pop_waiting()
            if request is not None:
                self._go_without(request)
        self.owners.epochs.handle_timers()
        self.reports.handle_timers()

    def timer(self) -> float | None:
        due = self.reports.timer()
        for when in (self.owners.epochs.timer(), self._requests.timer()):
            if when < due:
                due = when
        return due if due < NEVER else None


def _call(again: Callable[[], None]) -> int:
    again()
    return CALL_STEPS
