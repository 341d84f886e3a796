"""Received messages in their producers' order, without repetitions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.client.identity import ProducerIdentity, identity_of
from holdfast.client.protocol.effects import Message
from holdfast.client.pubqueue.format import parse_paper
from holdfast.client.pubqueue.reorder import (
    GAP_TIMEOUT_S,
    LATE,
    NEW,
    Deduplicate,
    Gap,
    Late,
    Ordered,
    Output,
    Reorder,
)

PAPER_EPOCH: Final = 0


def identify(message: Message) -> ProducerIdentity | None:
    """The identity in the property, otherwise in a payload of the paper's form. None: the message
    has neither."""
    try:
        identity = identity_of(message.properties)
    except ValueError:
        return None
    return identity if identity is not None else identify_paper(message)


def identify_paper(message: Message) -> ProducerIdentity | None:
    """The identity in the payload's id and sender, or None if it is not in the paper's form."""
    try:
        sequence, _, sender = parse_paper(message.payload)
    except ValueError:
        return None
    return ProducerIdentity(sender, PAPER_EPOCH, sequence)


async def ordered_messages(
    client: Client,
    *,
    complete: bool = False,
    gap_timeout_s: float = GAP_TIMEOUT_S,
    identify: Callable[[Message], ProducerIdentity | None] = identify,
    on_late: Callable[[Message], None] | None = None,
    on_gap: Callable[[Gap], None] | None = None,
) -> AsyncIterator[Message]:
    """`client.messages()` with each producer's messages of a topic ascending, without repetitions.

    Messages without an identity pass at once. `complete` orders over all topics, and waits up to
    `gap_timeout_s` for missing sequences. It is only for a subscription to everything that the
    producers send, in the default form. `on_late` gets a message whose position has passed,
    `on_gap` the sequences that are given up. A message that waits for a gap has been acknowledged
    already, unless `Options.manual_acknowledge` is set.
    """
    if not complete:
        deduplicate = Deduplicate()
        async for message in client.messages():
            identity = identify(message)
            verdict = NEW if identity is None else deduplicate.judge(identity, message.topic)
            if verdict == NEW:
                yield message
            elif verdict == LATE and on_late is not None:
                on_late(message)
        return
    reorder: Reorder[Message] = Reorder(gap_timeout_s)
    loop = asyncio.get_running_loop()
    received: Message | None = None
    failure: ClientError | None = None
    is_over = False
    while not is_over:
        output: list[Output[Message]] = []
        try:
            async with asyncio.timeout_at(reorder.timer()):
                received = await client.receive()
        except TimeoutError:
            output = reorder.handle_timer(loop.time())
        except ClientError as error:
            failure, is_over = error, True
            output = reorder.drain()
        else:
            if received is None:
                is_over = True
                output = reorder.drain()
            elif (identity := identify(received)) is None:
                output = [Ordered(received)]
            else:
                output = reorder.feed(identity, received, loop.time())
        for one in output:
            match one:
                case Ordered(message):
                    yield message
                case Late(message) if on_late is not None:
                    on_late(message)
                case Gap() if on_gap is not None:
                    on_gap(one)
    if failure is not None:
        raise failure
