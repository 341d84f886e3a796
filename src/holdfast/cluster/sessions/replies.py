"""The replies and orders of a coordinator to nodes, this one included (`local`)."""

from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import SESSION_CLOSE, SESSION_OPENED, SESSION_OWNED, BadFrame
from holdfast.cluster.sessions.requests import SessionRequest
from holdfast.cluster.state.replicated import ReplicatedState


class HomeAnswers:
    """The outbound side of the coordinator: SESSION_OPENED, SESSION_CLOSE and report requests."""

    def __init__(self, context: ClusterContext, replicated: ReplicatedState) -> None:
        self._context = context
        self._replicated = replicated
        # Replies and orders to this node itself; SessionAcquisition takes them.
        self.local: list[dict[str, object]] = []

    def denied(self, request: SessionRequest) -> None:
        """Refuses a request because the session belongs to another user.

        The reply also has `lost`, which is all that an older version understands.
        """
        self._send_opened(
            request,
            {
                "request": request.number,
                "client": request.client_id,
                "epoch": 0,
                "present": False,
                "lost": True,
                "denied": True,
                "session": None,
            },
        )

    def opened(self, request: SessionRequest, epoch: int, present: bool, is_lost: bool) -> None:
        """Sends the reply to a request. `is_lost`: the session was closed again and its will
        published."""
        client_id = request.client_id
        image = self._replicated.state.sessions.get(client_id)
        fields: dict[str, object] = {
            "request": request.number,
            "client": client_id,
            "epoch": epoch,
            "present": present,
            "lost": is_lost,
            "session": None,
        }
        if present and image is not None:
            fields["session"] = self._replicated.fields(image)
        self._send_opened(request, fields)

    def _send_opened(self, request: SessionRequest, fields: dict[str, object]) -> None:
        if request.node == self._context.node_id:
            self.local.append(fields)
        else:
            self._context.send_fields(request.node, SESSION_OPENED, fields)

    def order_close(self, node: str, client_id: str, epoch: int) -> None:
        """Orders the node to release a session that it has with this epoch."""
        fields: dict[str, object] = {"client": client_id, "epoch": epoch}
        if node == self._context.node_id:
            self.local.append({"close": True, **fields})
        else:
            self._context.send_fields(node, SESSION_CLOSE, fields)

    def ask_owned(self, nodes: list[str], partitions: list[int]) -> None:
        """Requests from these nodes a report of their sessions with these home partitions.

        The request contains the epochs in which this node leads them. Older versions ignore those.
        """
        epochs = [self._context.leading[partition] for partition in partitions]
        fields = {
            "ask": True,
            "partitions": partitions,
            "epochs": epochs,
            "owned": [],
            "asking": [],
        }
        for node in nodes if partitions else ():
            if node == self._context.node_id:
                self.asked_owned(node, partitions, epochs)
            else:
                self._context.send_fields(node, SESSION_OWNED, fields)

    def asked_owned(self, node: str, partitions: list[int], epochs: list[int] | None) -> None:
        """Queues the report of this node that `node` requests as the leader in these epochs. An
        older version names none. Raises BadFrame when they are malformed."""
        if epochs is None:
            epochs = [0] * len(partitions)
        if len(epochs) != len(partitions):
            raise BadFrame("not one epoch per partition")
        self.local.append({"tell": node, "partitions": partitions, "epochs": epochs})
