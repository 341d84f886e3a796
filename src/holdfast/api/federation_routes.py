"""Status of a broker's membership: `GET /api/v1/federation`.

With `?topic=NAME` it adds `mesh`: the members that want the topic, and the tree that reaches them,
as this member knows them. The response is 404 without a federation.
"""

from typing import Final

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, bad_request
from holdfast.api.process import FederatedProcess, FederationView
from holdfast.federation.sidecar.in_broker import FederationGraph
from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast.security.access.scopes import Scope

TOPIC: Final = Text("topic", "a topic, whose way to the other members is added", least=0,
                    most=65_535)  # fmt: skip


class FederationRoutes:
    """The routes of the federation."""

    def __init__(self, server: FederatedProcess) -> None:
        self._server = server

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/federation", Scope.VIEWER, "the membership of a federation",
                     self._status, dict, (TOPIC,), refusals=(404,)),
            Endpoint("GET", "/api/v1/federation/graph", Scope.VIEWER,
                     "all members that this one knows, and their links", self._graph,
                     FederationGraph, refusals=(404,)),
        ]  # fmt: skip

    @property
    def _federation(self) -> FederationView:
        """The membership. Raises `ApiRefusal` (404) without one."""
        federation = self._server.federation
        if federation is None:
            text = "this broker belongs to no federation: its configuration has no [federation]"
            raise ApiRefusal(404, text)
        return federation

    async def _graph(self, call: Call) -> FederationGraph:
        return self._federation.graph()

    async def _status(self, call: Call) -> object:
        federation = self._federation
        body = federation.status()
        topic = call.get(TOPIC)
        if topic is not None:
            try:
                decode_topic(topic.encode())
            except (InvalidTopic, UnicodeEncodeError) as error:
                raise bad_request(f"parameter topic: {error}") from None
            body["mesh"] = federation.mesh(topic)
        return body
