"""Sends a coordinator's replies and orders to nodes, this one included (`local`)."""

from holdfast.node.context import ClusterContext
from holdfast.node.features import RECORDED_SESSIONS
from holdfast.node.frame_kinds import SESSION_CLOSE, SESSION_OPENED, SESSION_OWNED, BadFrame
from holdfast.node.frames import CloseFrame, OpenedFrame, OwnedSessions
from holdfast.node.ownership.requests import SessionRequest
from holdfast.node.state.replicated import ReplicatedState


class ReportRequest:
    """The request of `node` for this node's report of its sessions with these home partitions, as
    their leader in these epochs."""

    def __init__(self, node: str, partitions: list[int], epochs: list[int]) -> None:
        self.node = node
        self.partitions = partitions
        self.epochs = epochs


class HomeAnswers:
    """The outbound side of the coordinator: SESSION_OPENED, SESSION_CLOSE and report requests."""

    def __init__(self, context: ClusterContext, replicated: ReplicatedState) -> None:
        self._context = context
        self._replicated = replicated
        # Replies and orders to this node itself; SessionAcquisition takes them.
        self.local: list[OpenedFrame | CloseFrame | ReportRequest] = []

    def refuse(
        self, request: SessionRequest, *, denied: bool = False, kept: list[str] | None = None
    ) -> None:
        """Sends a reply without a session. `denied`: it belongs to another user. `kept`: its owner
        keeps it, because it has these filters. Older versions understand no more than `lost`."""
        frame = OpenedFrame(
            request=request.number,
            client=request.client_id,
            epoch=0,
            present=False,
            lost=True,
            denied=denied,
            kept=kept,
            session=None,
        )
        self._send_opened(request, frame)

    def opened(self, request: SessionRequest, epoch: int, present: bool, is_lost: bool) -> None:
        """Sends the reply to a request. `is_lost`: the session was closed again and its will
        published."""
        image = self._replicated.state.sessions.get(request.client_id) if present else None
        is_older = not self._context.understands(request.node, RECORDED_SESSIONS)
        frame = OpenedFrame(
            request=request.number,
            client=request.client_id,
            epoch=epoch,
            present=present,
            lost=is_lost,
            maybe_sent=image is not None and image.rare.lacks_sent,
            session=self._replicated.entry(image) if image is not None and is_older else None,
        )
        self._send_opened(request, frame)

    def _send_opened(self, request: SessionRequest, frame: OpenedFrame) -> None:
        if request.node == self._context.node_id:
            self.local.append(frame)
        else:
            self._context.send_frame(request.node, SESSION_OPENED, frame)

    def order_close(self, node: str, frame: CloseFrame) -> None:
        """Orders the node to release a session that it has with this epoch."""
        if node == self._context.node_id:
            self.local.append(frame)
        else:
            self._context.send_frame(node, SESSION_CLOSE, frame)

    def ask_owned(self, nodes: list[str], partitions: list[int]) -> None:
        """Requests from these nodes a report of their sessions with these home partitions.

        The request contains the epochs in which this node leads them. Older versions ignore those.
        """
        epochs = [self._context.leading[partition] for partition in partitions]
        frame = OwnedSessions(ask=True, partitions=partitions, epochs=epochs, owned=[], asking=[])
        for node in nodes if partitions else ():
            if node == self._context.node_id:
                self.asked_owned(node, partitions, epochs)
            else:
                self._context.send_frame(node, SESSION_OWNED, frame)

    def asked_owned(self, node: str, partitions: list[int], epochs: list[int] | None) -> None:
        """Queues the report of this node that `node` requests as the leader in these epochs. An
        older version names none. Raises BadFrame when they are malformed."""
        if epochs is None:
            epochs = [0] * len(partitions)
        if len(epochs) != len(partitions):
            raise BadFrame("not one epoch per partition")
        self.local.append(ReportRequest(node, partitions, epochs))
