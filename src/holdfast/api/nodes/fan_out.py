"""Sends a question to all nodes and merges the replies.

A route offers a view under a name. The node that is asked reads its own view and asks the other
data nodes for theirs. A node that is down, or does not answer in time, is named in the reply.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from holdfast.api.endpoints import ApiRefusal
from holdfast.api.nodes.own_node import cluster_of
from holdfast.api.process import ServedProcess
from holdfast.api.views.pages import AbsentNode
from holdfast.io.peers.questions import TIMEOUT_S, NoPeerAnswer

P = TypeVar("P", bound=Struct)
R = TypeVar("R")

_encode: Final = msgspec.json.Encoder().encode
View = Callable[[Any], Awaitable[object]]


class Everywhere:
    """The views of this node that others may ask for, and the questions to the others."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._views: dict[str, tuple[msgspec.json.Decoder[Any], View]] = {}

    def connect(self) -> None:
        """Answers the questions of the other nodes from now on."""
        if self._server.cluster is not None:
            self._server.cluster.questions.answer = self._answer

    def offer(self, name: str, kind: type[P], view: Callable[[P], Awaitable[object]]) -> None:
        """Answers the question `name`, whose parameters are a `kind`, with a view."""
        self._views[name] = msgspec.json.Decoder(kind), view

    async def ask(
        self, node: str, name: str, parameters: Struct, kind: type[R], timeout_s: float = TIMEOUT_S
    ) -> R:
        """Returns the answer of one other node. Raises `ApiRefusal` (503) without one."""
        try:
            questions = cluster_of(self._server).questions
            body = await questions.ask(node, name, _encode(parameters), timeout_s)
            return msgspec.json.decode(body, type=kind)
        except (NoPeerAnswer, msgspec.DecodeError) as error:
            raise ApiRefusal(503, f"node {node}: {error}") from None

    async def ask_others(
        self, name: str, parameters: Struct, kind: type[R], timeout_s: float = TIMEOUT_S
    ) -> tuple[list[R], list[AbsentNode]]:
        """Returns the answers of the other nodes, and the nodes without one."""
        nodes = self._others()
        missing = [AbsentNode(node, reason) for node, reason in nodes.items() if reason]
        asked = [node for node, reason in nodes.items() if not reason]
        results: Sequence[R | BaseException] = await asyncio.gather(
            *(self.ask(node, name, parameters, kind, timeout_s) for node in asked),
            return_exceptions=True,
        )
        answers: list[R] = []
        for node, result in zip(asked, results, strict=True):
            if isinstance(result, ApiRefusal):
                missing.append(AbsentNode(node, str(result).removeprefix(f"node {node}: ")))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        return answers, missing

    def others(self) -> list[str]:
        """The other data nodes that are not down."""
        return [node for node, reason in self._others().items() if not reason]

    def _others(self) -> dict[str, str]:
        cluster = self._server.cluster
        return {} if cluster is None else cluster.other_nodes()

    async def _answer(self, name: str, parameters: Raw) -> bytes:
        """Answers a question of another node. Raises `NoPeerAnswer`."""
        found = self._views.get(name)
        if found is None:
            raise NoPeerAnswer(f"its version does not answer the question {name[:40]!r}")
        decoder, view = found
        try:
            return _encode(await view(decoder.decode(parameters)))
        except msgspec.DecodeError as error:
            raise NoPeerAnswer(f"it does not understand the question: {error}") from None
        except ApiRefusal as error:
            raise NoPeerAnswer(str(error)) from None
