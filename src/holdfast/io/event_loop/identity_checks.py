"""Asks the sources of identity: tokens, the HTTP check, hooks. None blocks the loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.io.event_loop.failures import watched
from holdfast.io.event_loop.hook_runner import HookSource, client_of
from holdfast.io.event_loop.topic_checks import TopicChecks, TopicServiceError
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.effects import AskRights, AskSources
from holdfast.node.node import Node
from holdfast.node.session.connection import AUTHENTICATING
from holdfast.security.acl import ClientRules
from holdfast.security.identity.http_check import HttpSource
from holdfast.security.identity.identity import (
    BUSY,
    UNAVAILABLE,
    Answer,
    IdentitySource,
    LoginRefusal,
    LoginRequest,
)
from holdfast.security.password_queue import PasswordQueue

logger = logging.getLogger("holdfast")

ASKED_MAX: Final = 64
"""The most clients about whom the sources are asked at once. Others wait, by address in turn."""

_BUSY: Final = LoginRefusal(BUSY, "too many clients are being authenticated: try again later")
_FAILED: Final = LoginRefusal(
    UNAVAILABLE, "the client cannot be authenticated now: try again later"
)


class IdentityChecks:
    """The sources of one broker, asked in their order. They may be replaced at any time."""

    def __init__(
        self, node: Node, loop: asyncio.AbstractEventLoop, touch: Callable[[], None]
    ) -> None:
        """`touch`: called before a reply is handed to the node."""
        self._node = node
        self._loop = loop
        self._touch = touch
        self._sources: tuple[IdentitySource, ...] = ()
        self.hooks: HookSource | None = None
        self.topics = TopicChecks(node, loop, touch)
        self._queue: PasswordQueue[AskSources] = PasswordQueue()
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def ask_rights(self, effect: AskRights) -> None:
        """Finds the rights of a client that hooks or a service decide about, and reports them to
        the node."""
        self._keep(watched(self._give_rights(effect)))

    async def _give_rights(self, effect: AskRights) -> None:
        rules: ClientRules | None = None
        failure: Exception | None = None
        try:
            if self.hooks is not None:
                rules = await self.hooks.authorise(client_of(effect.connection))
            if rules is None:
                rules = await self.topics.rules_of(effect.connection)
        except Exception as error:  # noqa: BLE001
            # Code of the operator may raise anything. Without its rights the client gets none.
            failure = error
        self._touch()
        if failure is not None:
            text = str(failure) or type(failure).__name__
            # The service's failure has a line of its own.
            if not isinstance(failure, TopicServiceError):
                logger.error("hook_failed hook='authorise' error=%r", text)
            self._node.handle_answer(effect.connection, _FAILED)
        else:
            self._node.handle_rights(effect, rules)

    def replace(self, sources: Sequence[IdentitySource]) -> None:
        """Asks these sources from now on. Questions that are open end by the sources of before."""
        before, self._sources = self._sources, tuple(sources)
        hooks = (each for each in self._sources if isinstance(each, HookSource))
        self.hooks = next(hooks, None)
        services = (each.topics for each in self._sources if isinstance(each, HttpSource))
        self.topics.replace(next(services, None))
        for source in before:
            if source not in self._sources:
                self._keep(watched(source.close()))
        for source in self._sources:
            if source not in before:
                self._keep(watched(source.start()))

    def ask(self, effect: AskSources) -> None:
        """Asks who the client is, and reports the reply to the node."""
        if self._queue.offer(address_of(effect.connection.remote), effect):
            self._begin()
        else:
            self._node.handle_answer(effect.connection, _BUSY)

    def close(self) -> None:
        """Ends all questions and sources."""
        self.topics.close()
        for task in self._tasks:
            task.cancel()
        for source in self._sources:
            # The loop may end before the source does; its threads and sockets end with the process.
            watched(source.close())
        self._sources = ()

    def _begin(self) -> None:
        while self._asked < ASKED_MAX:
            effect = self._queue.take()
            if effect is None:
                return
            if effect.connection.state != AUTHENTICATING:
                continue
            self._asked += 1
            self._keep(watched(self._answer(effect)))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, effect: AskSources) -> None:
        try:
            answer = await self._find(effect)
        finally:
            self._asked -= 1
        self._touch()
        self._node.handle_answer(effect.connection, answer)
        self._begin()

    async def _find(self, effect: AskSources) -> Answer:
        connection = effect.connection
        listener = connection.listener
        request = LoginRequest(
            effect.client_id,
            effect.username,
            effect.password,
            connection.certificate_name,
            connection.remote,
            listener.name,
        )
        for source in self._sources:
            if not listener.takes(source.method):
                continue
            try:
                answer = await source.authenticate(request)
            except Exception as error:  # noqa: BLE001
                # A source that fails refuses: a later one may know less.
                logger.error("identity_source_failed method=%r error=%r", source.method, str(error))
                return _FAILED
            if answer is not None:
                return answer
        return None
