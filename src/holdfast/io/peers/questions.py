"""Carries questions of one node's admin port to the other nodes, and their answers.

A question has a name and parameters; the answer is JSON, or the reason why there is none. An answer
is a snapshot of one node without any guarantee of order, so nothing of the cluster's agreement may
depend on one. Only nodes that announced FEATURE in the handshake are asked: others would close the
link at the unknown frame.

Bounds: a question has at most QUESTION_BYTES_MAX bytes and an answer ANSWER_BYTES_MAX. This node
waits for at most ASKED_MAX answers, each for its timeout, and works on at most ANSWERING_MAX
questions of all other nodes together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Raw, Struct, json

from holdfast.io.event_loop.failures import watched
from holdfast.node.frame_kinds import ANSWER, QUESTION, decode_json
from holdfast.security.peer_identity import features_in

logger = logging.getLogger("holdfast")

FEATURE: Final = "questions"
"""The word in the handshake of a node that understands QUESTION and ANSWER."""
QUESTION_BYTES_MAX: Final = 262_144
ANSWER_BYTES_MAX: Final = 8 << 20
ASKED_MAX: Final = 256
ANSWERING_MAX: Final = 32
TIMEOUT_S: Final = 3.0
"""The default time in seconds that an answer may take."""


class NoPeerAnswer(Exception):
    """A node has not answered a question. The text says why."""


class PeerQuestion(Struct):
    """QUESTION. `parameters` are those of the question `name`."""

    id: int
    name: str
    parameters: Raw


class PeerAnswer(Struct, omit_defaults=True):
    """ANSWER. `error` is empty if `body` is the answer."""

    id: int
    error: str = ""
    body: Raw = Raw(b"null")


Answering = Callable[[str, Raw], Awaitable[bytes]]
"""Answers the question of a name with JSON. Raises `NoPeerAnswer`."""

_QUESTION: Final = json.Decoder(PeerQuestion)
_ANSWER: Final = json.Decoder(PeerAnswer)
_encode: Final = json.Encoder().encode


class PeerQuestions:
    """The questions that this node waits for, and those of other nodes that it answers."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[str, int, bytes], bool]
    ) -> None:
        """`send` queues a frame for a node, and returns False if there is no link."""
        self._loop = loop
        self._send = send
        self._number = 0
        self._answering = 0
        # The connected nodes that understand questions.
        self._able: set[str] = set()
        # The questions under way, by number, with the asked node.
        self._asked: dict[int, tuple[str, asyncio.Future[Raw]]] = {}
        self.answer: Answering | None = None
        """The answers of this node. None: the admin port is off."""

    def connected(self, node: str, features: str) -> None:
        """Notes the features of a node that is connected."""
        self._able.discard(node)
        if FEATURE in features_in(features):
            self._able.add(node)

    def disconnected(self, node: str) -> None:
        """Ends the questions to a node whose link is lost."""
        self._able.discard(node)
        for asked, future in list(self._asked.values()):
            if asked == node and not future.done():
                future.set_exception(NoPeerAnswer("the link to it was lost"))

    async def ask(
        self, node: str, name: str, parameters: bytes, timeout_s: float = TIMEOUT_S
    ) -> Raw:
        """Returns the answer of a node. Raises `NoPeerAnswer` without one."""
        if node not in self._able:
            raise NoPeerAnswer("there is no link to it, or its version answers no questions")
        if len(self._asked) >= ASKED_MAX:
            raise NoPeerAnswer(f"this node waits for {ASKED_MAX} answers already")
        self._number += 1
        number = self._number
        payload = _encode(PeerQuestion(number, name, Raw(parameters)))
        if len(payload) > QUESTION_BYTES_MAX:
            raise NoPeerAnswer(f"the question has more than {QUESTION_BYTES_MAX} bytes")
        future: asyncio.Future[Raw] = self._loop.create_future()
        self._asked[number] = node, future
        try:
            if not self._send(node, QUESTION, payload):
                raise NoPeerAnswer("there is no link to it")
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise NoPeerAnswer(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._asked[number]

    def handle_frame(self, node: str, kind: int, payload: bytes) -> None:
        """Handles a QUESTION or an ANSWER. Raises `BadFrame` for a malformed one."""
        if kind == QUESTION:
            question = decode_json(_QUESTION, payload, "a question")
            if self.answer is None:
                self._refuse(node, question.id, "its admin port is off")
            elif self._answering >= ANSWERING_MAX:
                self._refuse(node, question.id, f"it answers {ANSWERING_MAX} questions already")
            else:
                self._answering += 1
                watched(self._answer(self.answer, node, question))
            return
        answer = decode_json(_ANSWER, payload, "an answer")
        asked, future = self._asked.get(answer.id, ("", None))
        # An answer that comes after the timeout, or from a node that was not asked, is ignored.
        if future is None or asked != node or future.done():
            return
        if answer.error:
            future.set_exception(NoPeerAnswer(answer.error))
        else:
            future.set_result(answer.body)

    async def _answer(self, answering: Answering, node: str, question: PeerQuestion) -> None:
        try:
            body = await answering(question.name, question.parameters)
        except NoPeerAnswer as error:
            self._refuse(node, question.id, str(error))
            return
        except Exception as error:
            # A defect of a view, as behind HTTP, where the caller receives 500.
            logger.error("question_failed name=%r error=%r", question.name, error, exc_info=error)
            self._refuse(node, question.id, "internal error: see its log")
            return
        finally:
            self._answering -= 1
        payload = _encode(PeerAnswer(question.id, body=Raw(body)))
        if len(payload) > ANSWER_BYTES_MAX:
            self._refuse(node, question.id, f"its answer has more than {ANSWER_BYTES_MAX} bytes")
        else:
            self._send(node, ANSWER, payload)

    def _refuse(self, node: str, number: int, text: str) -> None:
        self._send(node, ANSWER, _encode(PeerAnswer(number, text)))
