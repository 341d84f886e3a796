"""The side of the node that a client has come to: become the owner of its session, and know when
this node is it no longer.

A resumed session begins only when this node has applied everything that was committed anywhere
before (`barriers`): what the owner before has acknowledged is then known here too. None that a
record tells of begins while this node is in doubt (`doubt`): the others may have closed it already,
and even ended it, and a client that is told that it has a session must find it again.
"""

import base64
import struct
from typing import Final

from holdfast.broker.connections.close import close_connection, drop_session, log_close, refuse
from holdfast.broker.connections.connect import AcceptedConnect, finish_open, refuse_other_user
from holdfast.broker.recovery.recovery import Recovery
from holdfast.broker.recovery.state_records import log_progress, will_fields
from holdfast.broker.rights import proves_names
from holdfast.broker.session.connection import CLOSED, OPENING, Connection
from holdfast.broker.session.session import Session
from holdfast.broker.session.state import decode_cursor
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext, fields_of, number_of, text_of
from holdfast.cluster.frame_kinds import SESSION_CLOSED, SESSION_OPEN, SESSION_OWNED, BadFrame
from holdfast.cluster.reads.read_barrier import Barriers
from holdfast.cluster.sessions.coordinator import SessionCoordinator
from holdfast.protocol.mqtt import reasons
from holdfast.storage.record import Record

ASK_AFTER_S: Final = 0.001
"""After a CONNECT: the end of its connection, if that has come already, is seen first. A node that
was held up finds CONNECTs of clients that have gone elsewhere, and must not take their sessions."""
ASKING_MAX: Final = 100_000
"""CONNECTs that wait for their session; one that was asked for stays until that is answered."""
ASK_AGAIN_S: Final = 0.3
"""After a SESSION_OPEN without an answer."""
REFUSED_AFTER_S: Final = 2.0
"""So long a CONNECT waits for a majority, or for the end of doubt."""

NEVER: Final = float("inf")
NOTHING: Final = -1


class PendingOpen:
    """A CONNECT that waits for its session."""

    def __init__(
        self, number: int, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        self.number = number
        self.connection = connection
        self.client_id = client_id
        self.opening = opening
        # When to ask, or to ask again.
        self.ask_at = 0.0
        self.refused_at = 0.0
        # Then there will be an answer, and a session to close if the client has gone.
        self.is_asked = False
        # Once it is ours.
        self.answer: dict[str, object] | None = None
        # What must be passed first; NOTHING: it need not wait.
        self.barrier = NOTHING
        # Where the session goes on.
        self.positions: list[tuple[int, int]] = []

    @property
    def is_recorded(self) -> bool:
        """Has a record told that this node has the session? Known with the answer."""
        assert self.answer is not None
        is_new = not self.answer["present"]
        return not is_new or self.opening.expiry_s > 0 or self.opening.will is not None


class SessionAcquisition:
    def __init__(
        self,
        state: NodeState,
        fabric: ClusterContext,
        homes: SessionCoordinator,
        barriers: Barriers,
    ) -> None:
        self._state = state
        self._barriers = barriers
        self._fabric = fabric
        self._homes = homes
        self._number = 0
        self.asking: dict[int, PendingOpen] = {}
        # The same by client, in the order of their CONNECTs.
        self._of_clients: dict[str, list[PendingOpen]] = {}

    def begin_at(self, number: int) -> None:
        """Requests are numbered after this one, so that answers to an earlier process of this node
        are not taken for answers to this one."""
        self._number = number

    def open_session(self, connection: Connection, client_id: str, opening: object) -> None:
        assert isinstance(opening, AcceptedConnect)
        if len(self.asking) >= ASKING_MAX:
            refuse(
                self._state, connection, reasons.SERVER_BUSY, "too many sessions are being opened"
            )
            return
        self._number += 1
        asking = PendingOpen(self._number, connection, client_id, opening)
        asking.ask_at = self._state.now + ASK_AFTER_S
        asking.refused_at = self._state.now + REFUSED_AFTER_S
        self.asking[asking.number] = asking
        of_client = self._of_clients.setdefault(client_id, [])
        of_client.append(asking)
        for earlier in of_client[:-1]:
            # The home says whose the session is; until then another user's waits for its turn.
            if earlier.connection.username in (None, connection.username):
                self._supersede(earlier)

    def _supersede(self, asking: PendingOpen) -> None:
        """Its client has connected again. [MQTT-3.1.4-3]"""
        if asking.connection.state == OPENING:
            text = "another connection uses this client id"
            refuse(self._state, asking.connection, reasons.SERVER_BUSY, text)
        if not asking.is_asked:
            self._done(asking)
        elif asking.answer is not None:
            self._finish_if_ready(asking)

    def _done(self, asking: PendingOpen) -> None:
        del self.asking[asking.number]
        of_client = self._of_clients[asking.client_id]
        of_client.remove(asking)
        if of_client:
            of_client[0].ask_at = min(of_client[0].ask_at, self._state.now + ASK_AFTER_S)
        else:
            del self._of_clients[asking.client_id]

    def _ask(self, asking: PendingOpen) -> None:
        asking.ask_at = self._state.now + ASK_AGAIN_S
        if self._of_clients[asking.client_id][0] is not asking:
            # One after the other: an earlier one, asked again, would take the session from it.
            return
        opening = asking.opening
        fields: dict[str, object] = {
            "request": asking.number,
            "client": asking.client_id,
            "clean": opening.clean_start,
            "expiry_s": opening.expiry_s,
            "username": asking.connection.username,
        }
        if proves_names(self._state):
            # Older versions do not tell: from them a session is opened by whoever comes.
            fields["user"] = asking.connection.username
        if asking.connection.state == CLOSED:
            # It is not to be opened any more, if it was not yet.
            fields["gone"] = True
        if opening.will is not None:
            fields["will"] = will_fields(opening.will)
        home = self._homes.home(asking.client_id)
        leader = self._fabric.leader(home)
        asking.is_asked = asking.is_asked or leader != ""
        if leader == self._fabric.node_id:
            self._homes.open(leader, fields)
        elif leader:
            self._fabric.send_fields(leader, SESSION_OPEN, fields)

    def handle_opened(self, payload: bytes) -> None:
        self.opened(fields_of(payload, "request", "client", "epoch", "present", "lost", "session"))

    def opened(self, fields: dict[str, object]) -> None:
        asking = self.asking.get(number_of(fields, "request"))
        client_id = text_of(fields, "client")
        if asking is None or asking.client_id != client_id or asking.answer is not None:
            # Asked twice, answered twice: the later epoch is the one that counts, and is ours.
            if not fields["lost"]:
                self._renew(client_id, number_of(fields, "epoch"))
            return
        asking.answer = fields
        if fields.get("denied"):
            self._done(asking)
            if asking.connection.state == OPENING:
                refuse_other_user(self._state, asking.connection)
            return
        if fields["lost"]:
            self._give_up(asking)
            return
        asking.ask_at = NEVER
        if fields["present"]:
            asking.positions = _positions(fields["session"])
        if fields["present"] or not self._is_in_log(asking):
            asking.barrier = self._barriers.begin(is_patient=True)
        self._finish_if_ready(asking)

    def _is_in_log(self, asking: PendingOpen) -> bool:
        """Has a record told that this node has the session? Then its home was led by whoever has
        answered; else that may be a node that leads it no longer, and that does not know a session
        which is there to be resumed."""
        opening = asking.opening
        return opening.clean_start or opening.expiry_s > 0 or opening.will is not None

    def _give_up(self, asking: PendingOpen) -> None:
        """The others have taken this node for lost, and closed what it had just opened."""
        self._done(asking)
        if asking.connection.state == OPENING:
            text = "the cluster has closed the session"
            refuse(self._state, asking.connection, reasons.SERVER_BUSY, text)

    def _renew(self, client_id: str, epoch: int) -> None:
        session = self._state.sessions.get(client_id)
        if session is not None and session.epoch < epoch:
            session.epoch = epoch
            return
        for asking in self.asking.values():
            if asking.client_id == client_id and asking.answer is not None:
                asking.answer["epoch"] = max(epoch, number_of(asking.answer, "epoch"))
                return
        if session is None:
            self._tell_closed(client_id, epoch)

    def applied(self) -> None:
        """Records were applied, or a barrier was passed."""
        for asking in list(self.asking.values()):
            if asking.answer is not None:
                self._finish_if_ready(asking)

    def doubt_is_over(self) -> None:
        """What was decided about the sessions meanwhile is to be known before they begin."""
        for asking in self.asking.values():
            if asking.answer is not None and asking.is_recorded:
                asking.barrier = self._barriers.begin(is_patient=True)

    def _finish_if_ready(self, asking: PendingOpen) -> None:
        if asking.connection.state != OPENING:
            self._close_unused(asking)
            return
        if not self._fabric.is_whole or (self._state.is_unsure and asking.is_recorded):
            return
        if asking.barrier != NOTHING and not self._barriers.has_passed(asking.barrier):
            return
        for partition, offset in asking.positions:
            if self._state.delivered[partition] < offset:
                return
        answer = asking.answer
        assert answer is not None
        epoch = number_of(answer, "epoch")
        image = self._homes.image(asking.client_id)
        if image is None:
            # Behind a barrier its `open` record is applied, and so is an end.
            is_lost = asking.barrier != NOTHING and asking.is_recorded
        else:
            is_unknown_there = not answer["present"] and not self._is_in_log(asking)
            is_lost = image.owner != self._fabric.node_id and (
                image.epoch >= epoch or is_unknown_there
            )
        if is_lost:
            self._give_up(asking)
            return
        self._done(asking)
        session = self._session(answer)
        if answer["present"]:
            # What was released and stored since is known here, but not to whoever answered.
            session.inbound = self._homes.inbound(asking.client_id) or None
        session.epoch = number_of(answer, "epoch")
        present = bool(answer["present"])
        finish_open(self._state, asking.connection, session, present, asking.opening)

    def _close_unused(self, asking: PendingOpen) -> None:
        """The client has gone meanwhile."""
        assert asking.answer is not None
        session = Session(asking.client_id, asking.client_id.encode())
        session.epoch = number_of(asking.answer, "epoch")
        session.will = asking.opening.will
        session.expiry_s = asking.opening.expiry_s
        if session.expiry_s > 0 or session.will is not None:
            resumed = asking.answer["session"]
            # It was sent nothing here.
            maybe_sent = isinstance(resumed, dict) and bool(resumed.get("maybe_sent"))
            log_close(self._state, session, maybe_sent=maybe_sent)
        self._tell_closed(session.client_id, session.epoch)
        self._done(asking)

    def _session(self, answer: dict[str, object]) -> Session:
        client_id = text_of(answer, "client")
        found = answer["session"]
        if isinstance(found, dict):
            try:
                return Recovery(self._state).take_over(found)
            except (KeyError, ValueError, TypeError, AssertionError) as error:
                raise BadFrame(f"session of {client_id!r}: {error!r}") from None
        return Session(client_id, client_id.encode())

    def detached(self, session: Session) -> None:
        """Its connection is gone. What it leaves is in the log, or on its way there."""
        if self._state.sessions.get(session.client_id) is session:
            log_progress(self._state)
            drop_session(self._state, session)
        self._tell_closed(session.client_id, session.epoch)

    def _tell_closed(self, client_id: str, epoch: int) -> None:
        leader = self._fabric.leader(self._homes.home(client_id))
        if leader == self._fabric.node_id:
            self._homes.closed(leader, client_id, epoch)
        elif leader:
            fields = {"client": client_id, "epoch": epoch}
            self._fabric.send_fields(leader, SESSION_CLOSED, fields)

    def handle_close(self, payload: bytes) -> None:
        fields = fields_of(payload, "client", "epoch")
        self.close(text_of(fields, "client"), number_of(fields, "epoch"))

    def close(self, client_id: str, epoch: int) -> None:
        """Another node is to have the session."""
        session = self._state.sessions.get(client_id)
        if session is not None and session.epoch <= epoch and session.connection is not None:
            self._state.stats.sessions_taken_over += 1
            close_connection(
                self._state,
                session.connection,
                reasons.SESSION_TAKEN_OVER,
                "another connection uses this client id",
            )
            return
        self._tell_closed(client_id, epoch)

    def session_changed(self, record: Record) -> None:
        """A SESSION record was applied: is a session of ours somebody else's by it?"""
        client_id = record.client_id.decode()
        session = self._state.sessions.get(client_id)
        if session is None or session.connection is None:
            return
        image = self._homes.image(client_id)
        if image is not None and image.owner == self._fabric.node_id:
            session.epoch = max(session.epoch, image.epoch)
        elif record.sequence > session.epoch:
            self._lose(session, reasons.SESSION_TAKEN_OVER, "another connection has the session")
        elif record.sequence == session.epoch and session.recorded:
            # The others have taken this node for lost.
            self._lose(session, reasons.SERVER_BUSY, "the cluster has closed the session")

    def _lose(self, session: Session, reason: int, text: str) -> None:
        """What is appended for it from here on counts for nothing, by its epoch."""
        connection = session.connection
        assert connection is not None
        self._state.stats.sessions_taken_over += 1
        close_connection(self._state, connection, reason, text)

    def tell_owned(self, leader: str, partitions: list[int]) -> None:
        """`leader` leads these home partitions, newly or at a new link: it should know what lives
        here."""
        wanted = set(partitions)
        owned: list[tuple[str, int]] = []
        for session in self._state.sessions.values():
            if self._homes.home(session.client_id) in wanted:
                owned.append((session.client_id, session.epoch))
        users = {
            client_id: session.username
            for client_id, session in self._state.sessions.items()
            if session.is_owned and self._homes.home(client_id) in wanted
        }
        asking: list[str] = []
        for each in self.asking.values():
            if self._homes.home(each.client_id) in wanted:
                asking.append(each.client_id)
        if leader == self._fabric.node_id:
            self._homes.owned(leader, partitions, dict(owned), asking, users)
            return
        fields = {"partitions": partitions, "owned": owned, "asking": asking, "users": users}
        self._fabric.send_fields(leader, SESSION_OWNED, fields)

    def leader_changed(self, partition: int) -> None:
        """Ask the new one what the old one has not answered."""
        soon = self._state.now + ASK_AFTER_S
        for asking in self.asking.values():
            if asking.answer is None and self._homes.home(asking.client_id) == partition:
                asking.ask_at = min(asking.ask_at, soon)

    def take_local(self) -> None:
        """Answers and orders of this node's own homes, and what others' homes ask."""
        self._homes.flush()
        while self._homes.answers.local:
            local = self._homes.answers.local
            self._homes.answers.local = []
            for fields in local:
                if "close" in fields:
                    self.close(text_of(fields, "client"), number_of(fields, "epoch"))
                elif "tell" in fields:
                    partitions = fields["partitions"]
                    assert isinstance(partitions, list)
                    self.tell_owned(text_of(fields, "tell"), partitions)
                else:
                    self.opened(fields)

    def handle_timers(self) -> None:
        for asking in list(self.asking.values()):
            if asking.connection.state == CLOSED and not asking.is_asked:
                self._done(asking)
                continue
            if asking.refused_at <= self._state.now and asking.connection.state == OPENING:
                self._refuse_overdue(asking)
            if asking.ask_at <= self._state.now:
                self._ask(asking)

    def _refuse_overdue(self, asking: PendingOpen) -> None:
        if not self._fabric.has_majority(self._state.now):
            text = "no majority of the cluster can be reached"
        elif self._state.is_unsure and asking.answer is not None and asking.is_recorded:
            text = "this node cannot tell who owns the session"
        else:
            return
        refuse(self._state, asking.connection, reasons.SERVER_UNAVAILABLE, text)
        if asking.answer is not None:
            self._finish_if_ready(asking)

    def timer(self) -> float | None:
        if not self.asking:
            return None
        return min(asking.ask_at for asking in self.asking.values())


def _positions(session: object) -> list[tuple[int, int]]:
    """Of the session in an answer: (partition, offset) each. Raises BadFrame."""
    if not isinstance(session, dict):
        return []
    try:
        return decode_cursor(base64.b64decode(str(session["cursor"]))).positions
    except (KeyError, ValueError, struct.error) as error:
        raise BadFrame(f"cursor of a session: {error!r}") from None
