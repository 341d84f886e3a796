"""Status of a broker's membership: `GET /api/v1/federation`.

With `?topic=NAME` it adds `mesh`: the members that want the topic, and the tree that reaches them,
as this member knows them. The response is 404 without a federation. Any node of a cluster replies
with the status at the node that runs the member.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.process import FederatedProcess, FederationView
from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast.security.access.scopes import Scope
from holdfast_federation.core.graph import FederationGraph

R = TypeVar("R")
TOPIC: Final = Text("topic", "a topic, whose way to the other members is added", least=0,
                    most=65_535)  # fmt: skip


class FederationQuestion(Struct):
    """The question of another node for the status, or for the graph."""

    topic: str | None = None
    is_graph: bool = False


class FederationRoutes:
    """The routes of the federation."""

    def __init__(
        self,
        server: FederatedProcess,
        everywhere: Everywhere | None = None,
        is_member: Callable[[], bool] = lambda: False,
    ) -> None:
        """`everywhere`: the other nodes. `is_member`: whether the broker is to be a member once it
        serves."""
        self._server = server
        self._everywhere = everywhere
        self._is_member = is_member
        if everywhere is not None:
            everywhere.offer("federation", FederationQuestion, self._own)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/federation", Scope.VIEWER, "the membership of a federation",
                     self._status, dict, (TOPIC,), refusals=(404, 503)),
            Endpoint("GET", "/api/v1/federation/graph", Scope.VIEWER,
                     "all members that this one knows, and their links", self._graph,
                     FederationGraph, refusals=(404, 503)),
        ]  # fmt: skip

    @property
    def _federation(self) -> FederationView:
        """The membership. Raises `ApiRefusal`: 404 without one, 503 before the broker serves."""
        federation = self._server.federation
        if federation is None and self._is_member():
            raise ApiRefusal(503, "this node does not serve clients yet: see /readyz")
        if federation is None:
            text = "this broker belongs to no federation: its configuration has no [federation]"
            raise ApiRefusal(404, text)
        return federation

    async def _graph(self, call: Call) -> FederationGraph:
        question = FederationQuestion(is_graph=True)
        found = await self._elsewhere(question, FederationGraph)
        return self._federation.graph() if found is None else found

    async def _status(self, call: Call) -> object:
        topic = call.get(TOPIC)
        if topic is not None:
            try:
                decode_topic(topic.encode())
            except (InvalidTopic, UnicodeEncodeError) as error:
                raise bad_request(f"parameter topic: {error}") from None
        question = FederationQuestion(topic)
        found = await self._elsewhere(question, dict[str, object])
        return await self._own(question) if found is None else found

    async def _own(self, question: FederationQuestion) -> object:
        federation = self._federation
        if question.is_graph:
            return federation.graph()
        body = federation.status()
        if question.topic is not None:
            body["mesh"] = federation.mesh(question.topic)
        return body

    async def _elsewhere(self, question: FederationQuestion, kind: type[R]) -> R | None:
        """The reply of the node that runs the member, None if it is this one or does not reply."""
        federation, everywhere = self._federation, self._everywhere
        if everywhere is None or federation.federator is not None:
            return None
        node = federation.node
        if node not in everywhere.others():
            return None
        try:
            return await everywhere.ask(node, "federation", question, kind)
        except ApiRefusal:
            # What this node knows names the other one.
            return None
