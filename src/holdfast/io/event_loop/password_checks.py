"""Checks clients' passwords in threads: a hash costs milliseconds, or a hundred of them."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from holdfast.io.sockets.transport import ClientTransport
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.effects import CheckPassword
from holdfast.node.node import Node
from holdfast.node.session.connection import AUTHENTICATING
from holdfast.security.identity.identity import BUSY, LoginRefusal
from holdfast.security.password_queue import PasswordQueue
from holdfast.security.passwords import PasswordFile

logger = logging.getLogger("holdfast")

THREADS: Final = 2

_BUSY: Final = LoginRefusal(BUSY, "too many passwords are being checked")


class PasswordChecks:
    """The checks of one broker. `file`, and the file of a listener, may be replaced at any time. A
    check that has begun counts only for a user who has the same password in the present file."""

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        touch: Callable[[], None],
        file: PasswordFile | None,
    ) -> None:
        """`touch`: called before a result is handed to the node."""
        self.file = file
        self._node = node
        self._loop = loop
        self._touch = touch
        self._threads = ThreadPoolExecutor(THREADS, "password")
        self._queue: PasswordQueue[CheckPassword] = PasswordQueue()
        # The number of checks that the threads have.
        self._begun = 0

    def __len__(self) -> int:
        """The number of checks that wait for a thread."""
        return len(self._queue)

    def check(self, effect: CheckPassword) -> None:
        """Checks a password, and reports the result to the node."""
        file = self._file_of(effect)
        if file is None:
            # The file was removed from the settings since the CONNECT.
            self._node.handle_password_checked(effect.connection, False)
        elif file.is_remembered(effect.username, effect.password):
            # Returning clients never wait behind unknown ones.
            self._node.handle_password_checked(effect.connection, True)
        elif self._queue.offer(address_of(effect.connection.remote), effect):
            self._begin()
        else:
            self._node.handle_answer(effect.connection, _BUSY)

    def close(self) -> None:
        """Ends the threads, without the checks that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _file_of(self, effect: CheckPassword) -> PasswordFile | None:
        """The present file for the listener of a check."""
        own = effect.connection.listener.passwords
        return own if isinstance(own, PasswordFile) else self.file

    def _begin(self) -> None:
        """Gives each thread one check, and one to follow."""
        while self._begun < 2 * THREADS:
            effect = self._queue.take()
            if effect is None:
                return
            connection = effect.connection
            if connection.state != AUTHENTICATING:
                continue
            transport = connection.transport
            if isinstance(transport, ClientTransport) and transport.has_left():
                # The client cannot receive the result, so the costly hash is saved.
                self._node.handle_left(connection)
                continue
            file = self._file_of(effect)
            if file is None:
                self._node.handle_password_checked(connection, False)
                continue
            self._begun += 1
            future = self._threads.submit(file.verify, effect.username, effect.password)
            future.add_done_callback(partial(self._arrived, effect, file))

    def _arrived(self, effect: CheckPassword, by: PasswordFile, done: Future[bool]) -> None:
        """Passes the result to the loop. Runs in the thread."""
        if not done.cancelled():
            self._loop.call_soon_threadsafe(self._finished, effect, by, done)

    def _finished(self, effect: CheckPassword, by: PasswordFile, done: Future[bool]) -> None:
        self._touch()
        self._begun -= 1
        self._begin()
        file = self._file_of(effect)
        error = done.exception()
        if error is not None:
            logger.error("password_check_failed error=%r", str(error))
        is_known = file is not None and file.has_same_hash(effect.username, by)
        valid = is_known and error is None and done.result()
        self._node.handle_password_checked(effect.connection, valid)
