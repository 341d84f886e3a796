"""Releases a session of this node, as the coordinator orders it for another connection.

A client that is refused takes nothing over. So the owner keeps its connection until the open of the
session cannot fail for a reason that is known before.

Invariants
- An order follows a read of the metadata that began with the request (`reads.read_index`): this
  node still leads the home partition, and a majority can agree on what follows. Counter-example: a
  node that is cut off closes the live connection of a client, and then refuses the new one.
- An order contains the checksum of the filters that a service has decided about for the new
  connection, if one decides. The owner, which knows them first, keeps the session while it has
  others. The reply names them. Counter-example: the owner accepts a subscription, another node
  takes the session, the service fails to decide about that subscription, and the client is refused.

An owner that does not reply in time loses the session all the same. So does one whose version lacks
`FEATURE`: it ignores the checksum.
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.context import NEVER
from holdfast.node.frames import CloseFrame
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.owners import Owner, Owners
from holdfast.node.ownership.replies import HomeAnswers
from holdfast.node.ownership.requests import SessionRequest, SessionRequests
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.sweep import Sweep

FEATURE: Final = "release-orders"
"""The feature of a node whose coordinator orders every owner to release, also the node that has
requested the session. An older coordinator expects of that node that it has done so before."""
CLOSE_WAIT_S: Final = 1.0
"""The time in seconds that the previous owner has to release a session. After it the session is
reassigned without the owner's last records.

A lost link does not shorten it: the node may be alive and deliver messages until its ownership
lease ends (`ownership_lease`). That lease must be shorter than this time.
"""

ORDER_STEPS: Final = 2
"""The steps of one order: it costs a frame."""


class Releases:
    """The requests of a coordinator that wait for the owner of their session."""

    def __init__(
        self,
        state: NodeState,
        requests: SessionRequests,
        owners: Owners,
        answers: HomeAnswers,
        reads: MetadataReads,
        begin: Callable[[SessionRequest], None],
    ) -> None:
        """`begin` begins with a request whose session has no owner any more."""
        self._state = state
        self._requests = requests
        self._owners = owners
        self._answers = answers
        self._reads = reads
        self._begin = begin
        self._orders: Sweep[SessionRequest] = Sweep(state)
        # The requests without an order yet, each with the read that comes first, in order.
        self.confirming: dict[SessionRequest, int] = {}
        self.wait_s = CLOSE_WAIT_S
        self.count = 0

    def begin(self, request: SessionRequest, owner: Owner) -> None:
        """Lets the request wait until the owner has released its session."""
        request.waits_for = owner.node
        request.deadline = NEVER
        self.confirming.pop(request, None)
        self.confirming[request] = self._reads.begin()

    def advance(self) -> None:
        """Sends the orders whose read is complete, at the begin of the end of a turn."""
        passed: list[SessionRequest] = []
        for request, read in self.confirming.items():
            if not self._reads.has_passed(read):
                break
            passed.append(request)
        for request in passed:
            del self.confirming[request]
        if passed:
            self._orders.begin(passed, self._order_first)

    def _order_first(self, request: SessionRequest) -> int:
        """Orders the release for a request that is still being served and waits."""
        if self._requests.first(request.client_id) is not request or not request.waits_for:
            return 1
        if request not in self.confirming and request.deadline == NEVER:
            self._order(request)
        return ORDER_STEPS

    def _order(self, request: SessionRequest) -> None:
        owner = self._owners.owner(request.client_id)
        if owner is None or owner.node != request.waits_for:
            self._begin(request)
            return
        self._requests.wait(request, self._state.now + self.wait_s)
        self.count += 1
        self._send(request, owner)

    def _send(self, request: SessionRequest, owner: Owner) -> None:
        frame = CloseFrame(request.client_id, owner.epoch, request.filters)
        self._answers.order_close(owner.node, frame)

    def forget(self, request: SessionRequest) -> None:
        """Drops a request that is served or withdrawn."""
        self.confirming.pop(request, None)

    def repeat(self, node: str) -> None:
        """Repeats the orders to `node`, which may have missed one."""
        for request in self._requests.firsts():
            owner = self._owners.owner(request.client_id)
            is_ordered = request.waits_for == node and request.deadline < NEVER
            if is_ordered and owner is not None and owner.node == node:
                self._send(request, owner)

    def kept(self, node: str, client_id: str, filters: list[str]) -> SessionRequest | None:
        """Takes the reply of an owner that keeps the session because of these filters. Returns the
        request that ends by it, if there is one."""
        request = self._requests.first(client_id)
        if request is None or request.waits_for != node or request.filters is None:
            return None
        if request.is_opening or request.deadline == NEVER:
            return None
        self._answers.refuse(request, kept=filters)
        return request
