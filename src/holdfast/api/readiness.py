"""Finds the reasons why a node does not serve its clients fully.

`/readyz`, the log, the metrics and `holdfast cluster status` use the same list of obstacles. So
none of them reports a healthy node while publishes wait, are refused, or clients are sent away. The
symptom itself is the last check: an acknowledgement that has waited too long is an obstacle,
whatever it waits for.
"""

import asyncio
import logging
from typing import Final

from msgspec import Struct

from holdfast.api.cluster_operations import ClusterFigures
from holdfast.api.process import ServedProcess
from holdfast.node.metadata.status import StopEffect

logger = logging.getLogger("holdfast")

WAITS_S: Final = 2.0
"""The time in seconds after which a waiting acknowledgement is an obstacle."""
LOOK_S: Final = 0.5
PARTITIONS_NAMED: Final = 10
"""The most partitions that the text of an obstacle names."""
STOP_LOOK_S: Final = 0.1
"""The time in seconds between two looks at whether the others can do without this node."""


class Obstacle(Struct, frozen=True):
    """One reason why a node does not serve fully."""

    name: str
    """The name for programs."""
    text: str
    """The text for people: the consequence for clients."""
    is_expected: bool = False
    """Whether an operator asked for it, or it belongs to a start."""


def obstacles(server: ServedProcess) -> list[Obstacle]:
    """Returns the obstacles, the most serious first. The node is ready if there are none."""
    found: list[Obstacle] = []
    cluster = server.cluster
    if cluster is not None:
        found += _of_cluster(cluster.figures())
        if down := [node for node in server.siblings if not cluster.figures().peers.get(node)]:
            text = f"{', '.join(down)} of this machine's processes: their partitions wait"
            found.append(Obstacle("process_down", text))
    broker = server.broker
    if broker is None:
        if server.sharing is not None:
            found.append(Obstacle("standby", "another node serves", is_expected=True))
        elif cluster is None or not cluster.figures().is_witness:
            text = "the node does not serve clients yet"
            found.append(Obstacle("not_serving", text, is_expected=True))
        return found
    state = broker.node.state
    if state.closing or server.is_stopping:
        found.append(Obstacle("closing", "the node is stopping", is_expected=True))
    if state.has_stopped_partition:
        text = f"invariants do not hold, so the node has stopped {', '.join(state.stopped)}"
        found.append(Obstacle("invariant_broken", f"{text}: restart it, and report its log"))
    if state.redirect:
        text = "clients are sent to other nodes"
        found.append(Obstacle("sends_away", text, is_expected=True))
    if state.disk_full:
        found.append(Obstacle("disk_full", "the disk is full: QoS 1 and 2 are refused"))
    waits_s = broker.runtime.waits_s(broker.loop.time())
    if waits_s > WAITS_S:
        text = f"acknowledgements have been waiting for {waits_s:.1f} s"
        found.append(Obstacle("publishes_wait", text))
    return found


def _of_cluster(figures: ClusterFigures) -> list[Obstacle]:
    if not figures.initialised:
        text = "the node belongs to no cluster yet"
        return [Obstacle("not_initialised", text, is_expected=True)]
    found = []
    if figures.is_removed:
        text = "the node was removed from the cluster: stop it"
        found.append(Obstacle("removed", text))
    if figures.awaited:
        text = f"{', '.join(figures.awaited)} may have more than the disks that are here"
        text += ", and has not been met since the start: the cluster waits for it"
        found.append(Obstacle("awaits_nodes", text, is_expected=True))
    if not figures.has_majority:
        text = "the node reaches no majority of the cluster: nothing is acknowledged"
        found.append(Obstacle("no_majority", text))
    if figures.is_older_copy:
        text = (
            "the disk is an older copy of what it was: the node takes part in nothing before the"
            " others are a majority without it, or it is stopped and `holdfast cluster"
            " accept-older-copy` is given"
        )
        found.append(Obstacle("older_copy", text))
    if figures.is_damaged:
        found.append(Obstacle("disk_damaged", "what is on the disk is not what was written"))
    if figures.is_disk_stalled:
        found.append(Obstacle("disk_stalled", "the disk does not answer"))
    if figures.lacking:
        text = f"sessions and retained messages of {figures.lacking} partitions are being fetched"
        found.append(Obstacle("lacking", text, is_expected=True))
    if figures.lacks_voters:
        text = "not all nodes vote yet: the loss of one may cost the majority"
        found.append(Obstacle("lacks_voters", text, is_expected=True))
    if figures.is_witness:
        return found
    if figures.has_majority and figures.unsure_s > WAITS_S:
        text = (
            "a node that is not down confirms no heartbeats: this node does not know the owners of"
            " sessions, and refuses clients"
        )
        found.append(Obstacle("ownership_unsure", text))
    if figures.lags:
        text = (
            "the node lags behind in the log, and refuses clients whose sessions others can resume"
        )
        found.append(Obstacle("lags", text, is_expected=True))
    if figures.leaderless:
        text = (
            f"{figures.leaderless} partitions have no leader: their messages wait, then are refused"
        )
        found.append(Obstacle("leaderless", text))
    if figures.unread:
        names = ", ".join(map(str, figures.unread[:PARTITIONS_NAMED]))
        text = f"no replica of partitions {names} can be read: sessions that are behind wait"
        found.append(Obstacle("reads_wait", text))
    if figures.below_min_insync:
        text = (
            f"{figures.below_min_insync} partitions have fewer than min_insync replicas in sync:"
            " their QoS 1 and 2 messages are refused"
        )
        found.append(Obstacle("below_min_insync", text))
    return found


def stop_obstacles(server: ServedProcess) -> list[Obstacle]:
    """Returns the reasons why a stop of this node now would end the service of the cluster."""
    effect = _stop_effect(server)
    found: list[Obstacle] = []
    if effect.loses_majority:
        text = "the other nodes would be no majority: nothing would be acknowledged"
        found.append(Obstacle("no_majority", text))
    if effect.below_min_insync:
        text = (
            f"{effect.below_min_insync} partitions would have fewer than min_insync replicas in"
            " sync: their QoS 1 and 2 messages would be refused"
        )
        found.append(Obstacle("below_min_insync", text))
    return found


def _stop_effect(server: ServedProcess) -> StopEffect:
    figures = None if server.cluster is None else server.cluster.figures()
    # Without a majority the node acknowledges nothing that its stop could end.
    return figures.stop if figures is not None and figures.has_majority else StopEffect()


async def wait_until_spared(server: ServedProcess, longest_s: float) -> None:
    """Waits while the stop of this node would end the service, and a connected node is about to
    change that. Afterwards the other nodes count this one as gone.

    Counter-example: a rolling update restarts n3, then n2 as soon as n3 serves again. n3 has not
    fetched yet what it missed. With n2 gone only n1 is in sync, and the cluster refuses publishes.
    A node that is down is not waited for: when all nodes are stopped, none of them comes back. One
    that leaves during the wait is: two nodes of three receive SIGTERM in the same second, and each
    alone could be spared.
    """
    cluster = server.cluster
    if cluster is None:
        return
    loop = asyncio.get_running_loop()
    began = loop.time()
    is_logged = False
    cluster.departure.ask()
    while not cluster.departure.may_leave(cluster.figures()) and loop.time() < began + longest_s:
        if _stop_effect(server).is_passing and not is_logged:
            is_logged = True
            text = "; ".join(each.text for each in stop_obstacles(server))
            logger.warning("stop_waits longest_s=%g text=%r", longest_s, text)
        await asyncio.sleep(STOP_LOOK_S)
    cluster.departure.leave()
    if is_logged:
        logger.info("stop_continues seconds=%.1f", loop.time() - began)


class Readiness:
    """Logs when an obstacle appears and when it has gone.

    Before the node is first ready it is starting. Until it serves clients it logs nothing, then
    only obstacles that no start has, for example a full disk.
    """

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._was_ready = False
        self._known: dict[str, float] = {}
        """The time at which each obstacle was first seen."""

    async def watch(self) -> None:
        """Looks every LOOK_S, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Logs the obstacles that appeared or ended since the last look."""
        found = {each.name: each for each in obstacles(self._server)}
        if not self._was_ready:
            self._was_ready = not found
            serves = self._server.broker is not None
            found = {name: each for name, each in found.items() if serves and not each.is_expected}
        for name, obstacle in found.items():
            if name not in self._known:
                self._known[name] = now
                level = logging.INFO if obstacle.is_expected else logging.ERROR
                logger.log(level, "not_ready reason=%s text=%r", name, obstacle.text)
        for name in self._known.keys() - found.keys():
            seconds = now - self._known.pop(name)
            level = logging.INFO if found else logging.WARNING
            logger.log(level, "obstacle_gone reason=%s seconds=%.1f", name, seconds)
