"""The status of a broker's membership: `GET /api/v1/federation`.

With `?topic=NAME` it adds `mesh`: the members that want the topic, and the tree that reaches them,
as this member knows them. The response is 404 without a federation.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.api.log_routes import BadRequest
from holdfast.api.process import FederatedProcess
from holdfast.protocol.topics.names import InvalidTopic, decode_topic


class FederationRoutes:
    """The routes of the federation."""

    def __init__(self, server: FederatedProcess) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        return [Route("/api/v1/federation", self._status)]

    async def _status(self, request: Request) -> Response:
        federation = self._server.federation
        if federation is None:
            text = "this broker belongs to no federation: its configuration has no [federation]"
            return JSONResponse({"error": text}, 404)
        body = federation.status()
        topic = request.query_params.get("topic")
        if topic is not None:
            try:
                decode_topic(topic.encode())
            except (InvalidTopic, UnicodeEncodeError) as error:
                raise BadRequest(f"parameter topic: {error}") from None
            body["mesh"] = federation.mesh(topic)
        return JSONResponse(body)
