"""Takes commands from `$CONTROL/dynamic-security/v1`, and publishes the responses.

A command never enters the log, because it may contain a password. The driver runs it off the event
loop, and the client's next packets wait. So a connection has one command under way, and its
acknowledgements keep their order.
"""

from typing import Final

from holdfast.node.delivery.transmission import send_qos0
from holdfast.node.effects import ResumeInput, RunCommands
from holdfast.node.node_state import NodeState, ReplyPromise, Route
from holdfast.node.publish.acceptance import is_repeated
from holdfast.node.publish.completion import acknowledgement
from holdfast.node.rights import may_command, may_read
from holdfast.node.routing.routing import merge, subscriptions_of
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.errors import MessageRefused
from holdfast.protocol.mqtt.publish import Publish


class CommandPort:
    """The driver's way to run commands. Only the driver may touch files and hash passwords."""

    def run(self, effect: RunCommands) -> None:
        """Runs the commands of a message, and reports the response with
        `finish_commands`."""
        raise NotImplementedError

    def close(self) -> None:
        """Runs no more commands."""
        raise NotImplementedError


COMMAND_TOPIC: Final = "$CONTROL/dynamic-security/v1"
"""The topic of commands, as clients without a mount publish to it. A client behind a mount reaches
only topics below it, so a tenant never commands."""
RESPONSE_TOPIC: Final = "$CONTROL/dynamic-security/v1/response"
"""The topic of responses. Subscribers to it receive the responses to their own commands only."""
COMMAND_BYTES_MAX: Final = 256 << 10
"""The most bytes of a message with commands."""


def take_command(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> bool:
    """Passes the commands of a message to the driver. Returns False if the topic is another one, or
    the client may not send commands. Raises `MessageRefused` for too large a message.

    The message is acknowledged by `finish_commands`. A client that loses its connection before the
    acknowledgement does not know whether the commands were run. It sends them again, and the second
    run of, for example, `createClient` fails because the client exists.
    """
    if not (
        route.reserved
        and state.admission.takes_commands
        and route.topic == COMMAND_TOPIC
        and may_command(connection, route)
    ):
        return False
    if len(publish.payload) > COMMAND_BYTES_MAX:
        text = f"commands have at most {COMMAND_BYTES_MAX} bytes"
        raise MessageRefused(reasons.QUOTA_EXCEEDED, text)
    if publish.qos == 2:
        connection.unacknowledged += 1
        if is_repeated(state, connection, session, publish, route.partition):
            return True
        session.hold_inbound(publish.packet_id, route.partition)
    connection.input_paused = True
    effect = RunCommands(connection, publish.payload, publish.qos, publish.packet_id)
    state.effects.append(effect)
    return True


def finish_commands(state: NodeState, effect: RunCommands, response: bytes) -> None:
    """Sends the response and the acknowledgement, and reads the client's next packets. The changes
    are on disk and in force. An empty response is not sent: the commands were not run."""
    connection = effect.connection
    session = connection.session
    if connection.state != OPEN or session is None:
        return
    if response:
        _respond(state, session, response)
    if effect.qos > 0:
        packet_type = acknowledgement(effect.qos)
        reason = reasons.SUCCESS if response else reasons.UNSPECIFIED_ERROR
        reply = encode_ack(packet_type, effect.packet_id, reason, connection.version)
        state.promise(ReplyPromise(connection, reply, False))
    state.effects.append(ResumeInput(connection))


def _respond(state: NodeState, session: Session, response: bytes) -> None:
    """Sends the response to the client of the commands, if it has subscribed to it and may read it,
    and to no other client."""
    topic = RESPONSE_TOPIC.encode()
    if not may_read(session, topic):
        state.stats.reads_denied += 1
        return
    matching = subscriptions_of(state, session, RESPONSE_TOPIC)
    if matching:
        message = Message(topic, response, 0, False, b"", -1, state.wall_us, b"")
        send_qos0(state, merge(matching), message)
