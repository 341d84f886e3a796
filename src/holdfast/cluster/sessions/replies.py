"""What the leader of a home partition tells nodes of sessions; itself, too: `local`."""

from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import SESSION_CLOSE, SESSION_OPENED, SESSION_OWNED
from holdfast.cluster.sessions.requests import SessionRequest
from holdfast.cluster.state.replicated import ReplicatedState


class HomeAnswers:
    def __init__(self, fabric: ClusterContext, images: ReplicatedState) -> None:
        self._fabric = fabric
        self._images = images
        # Answers and orders to this node itself; opening.Opener takes them.
        self.local: list[dict[str, object]] = []

    def denied(self, request: SessionRequest) -> None:
        """The session is another user's. An older version takes it for lost."""
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
        """`is_lost`: the session was closed again meanwhile, and its will published."""
        client_id = request.client_id
        image = self._images.state.sessions.get(client_id)
        fields: dict[str, object] = {
            "request": request.number,
            "client": client_id,
            "epoch": epoch,
            "present": present,
            "lost": is_lost,
            "session": None,
        }
        if present and image is not None:
            fields["session"] = self._images.fields(image)
        self._send_opened(request, fields)

    def _send_opened(self, request: SessionRequest, fields: dict[str, object]) -> None:
        if request.node == self._fabric.node_id:
            self.local.append(fields)
        else:
            self._fabric.send_fields(request.node, SESSION_OPENED, fields)

    def order_close(self, node: str, client_id: str, epoch: int) -> None:
        """The node is to let go of a session that it has with this epoch."""
        fields: dict[str, object] = {"client": client_id, "epoch": epoch}
        if node == self._fabric.node_id:
            self.local.append({"close": True, **fields})
        else:
            self._fabric.send_fields(node, SESSION_CLOSE, fields)

    def ask_owned(self, nodes: list[str], partitions: list[int]) -> None:
        """These nodes are to tell which sessions with these homes they have."""
        fields = {"ask": True, "partitions": partitions, "owned": [], "asking": []}
        for node in nodes if partitions else ():
            if node == self._fabric.node_id:
                self.local.append({"tell": node, "partitions": partitions})
            else:
                self._fabric.send_fields(node, SESSION_OWNED, fields)
