"""Lets a node that stores the log reply for one that does not.

A gateway's routes of records, topics, histories and traces are those of every node. Their handlers
refuse there with 421. The request then goes to a node with the log, over the link between the
nodes, with the scope that the gateway has granted. Replies that are no JSON document stay refused,
and so do the routes of programs that read the log at its nodes (`api.log_routes`).
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from holdfast.api.dispatch import parameters_of
from holdfast.api.endpoints import ApiRefusal, Call, Caller, Endpoint, Handler
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode, log_servers
from holdfast.security.access.scopes import Scope

NOT_STORED: Final = 421
JSON: Final = "application/json"
QUESTION: Final = "log_reply"
TIMEOUT_S: Final = 20.0
"""The time in seconds that a reply may take, which may scan the log."""


class LogQuestion(Struct):
    """A GET request. `scope` is that of its caller at the node that was asked."""

    path: str
    query: str
    caller: str
    scope: Scope


class LogReply(Struct, omit_defaults=True):
    """Its JSON, or the status and text of its refusal."""

    body: Raw = Raw(b"null")
    status: int = 200
    error: str = ""


class LogElsewhere:
    """The routes that another node may carry out."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        self._endpoints: dict[str, Endpoint] = {}
        everywhere.offer(QUESTION, LogQuestion, self._reply)

    def wrap(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """The endpoints, of which those that read the log ask another node if they must."""
        found: list[Endpoint] = []
        for each in endpoints:
            if each.method == "GET" and NOT_STORED in each.refusals and each.media_type == JSON:
                self._endpoints[each.path] = each
                each = replace(each, handler=partial(self._handle, each.handler))
            found.append(each)
        return found

    async def _handle(self, handler: Handler, call: Call) -> object:
        try:
            return await handler(call)
        except ApiRefusal as error:
            accepted = call.request.headers.get("accept", "")
            others = [other for other in call.endpoint.other_media_types if other in accepted]
            if error.status != NOT_STORED or others:
                raise
            refusal = error
        url = call.request.url
        question = LogQuestion(url.path, url.query, call.caller.name, call.caller.scope)
        for name, _ in log_servers(self._node.broker):
            try:
                reply = await self._everywhere.ask(name, QUESTION, question, LogReply, TIMEOUT_S)
            except ApiRefusal:
                # It is down, or of an older version. The refusal names the nodes to ask.
                continue
            if reply.error:
                raise ApiRefusal(reply.status, reply.error)
            return Response(bytes(reply.body), media_type=JSON)
        raise refusal

    async def _reply(self, question: LogQuestion) -> LogReply:
        """Carries out a request that another node has admitted."""
        endpoint = self._endpoints.get(question.path)
        if endpoint is None or question.scope < endpoint.scope:
            return LogReply(status=404, error=f"the node has no {question.path} for this caller")
        request = Request(
            {
                "type": "http",
                "method": "GET",
                "path": question.path,
                "query_string": question.query.encode(),
                "headers": [],
            }
        )
        try:
            caller = Caller(question.caller, question.scope)
            values = parameters_of(request, endpoint)
            result = await endpoint.handler(Call(request, endpoint, caller, values))
        except ApiRefusal as error:
            return LogReply(status=error.status, error=str(error))
        return LogReply(Raw(msgspec.json.encode(result)))
