"""Who plays in a run. A cast is a group of parties that belong together; a run has some of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.sim.client import FOREVER, Client
from tests.sim.federators import Federators
from tests.sim.teams import Absentee, Leaver, LoneTeam, Member, Mute, Team, TeamPublisher
from tests.sim.timed import (
    LONG_S,
    Delayed,
    Fleeting,
    Perishable,
    PerishableSubscriber,
    Punctual,
    Scheduler,
)
from tests.sim.travellers import Traveller
from tests.sim.whispers import Listener, Whisperer, WhisperTeam
from tests.sim.workload import (
    TOPICS,
    Device,
    Dying,
    Mover,
    Party,
    Producer,
    Publisher,
    RetainedReader,
    Retainer,
    SlowPublisher,
    Subscriber,
)

if TYPE_CHECKING:
    from tests.sim.world import World

LOG: Final = "log"
"""QoS 1 and 2, retained messages, wills."""
QOS0: Final = "qos0"
TIMED: Final = "timed"
"""Wills with a delay, sessions and messages that expire."""
GROUPS: Final = "groups"
"""Shared subscriptions."""
MOVERS: Final = "movers"
"""Sessions that are taken over all the time."""
CASTS: Final = (LOG, QOS0, TIMED, GROUPS, MOVERS)
TRAVELLERS: Final = "travellers"
"""Sessions that begin in the past. They play beside LOG."""
QUEUES: Final = "queues"
"""Shared subscriptions that outlive their members: each member's session ends with its
connection."""
LEAVERS: Final = "leavers"
"""Shared subscriptions whose members unsubscribe, stay away or never acknowledge."""
SCHEDULED: Final = "scheduled"
"""Delayed messages."""
DEVICES: Final = "devices"
"""Sessions that begin again: with Clean Start, or at the moment of their expiry. They play
beside any other."""
RETAINED: Final = "retained"
"""Retained messages, and sessions that begin again to receive them."""
FEDERATORS: Final = "federators"
"""The state of a member of a federation."""
ALL_CASTS: Final = (*CASTS, TRAVELLERS, QUEUES, SCHEDULED, LEAVERS, DEVICES, RETAINED, FEDERATORS)


def parties(world: "World") -> list[Party]:
    makers: dict[str, Callable[[World], list[Party]]] = {
        LOG: _log,
        QOS0: _qos0,
        TIMED: _timed,
        GROUPS: _groups,
        MOVERS: _movers,
        TRAVELLERS: _travellers,
        QUEUES: _queues,
        SCHEDULED: _scheduled,
        LEAVERS: _leavers,
        DEVICES: _devices,
        RETAINED: _retained,
        FEDERATORS: lambda world: [Federators(world)],
    }
    return [party for cast in world.settings.casts for party in makers[cast](world)]


def _log(world: "World") -> list[Party]:
    every = tuple((topic, 2) for topic in TOPICS)
    return [
        Subscriber(world, Client(world, "sub5", 5, filters=(("t/#", 2),)), ("t/",)),
        Subscriber(world, Client(world, "sub4", 4, filters=(("t/#", 1),)), ("t/",)),
        Subscriber(
            world, Client(world, "subw", 5, filters=(*every[:1], ("w/#", 2))), ("t/0", "w/")
        ),
        Publisher(world, Client(world, "pub5", 5)),
        Publisher(world, Client(world, "pub4", 4)),
        Producer(world, Client(world, "producer", 5, clean=True)),
        Retainer(world, Client(world, "retainer", 5, clean=True)),
        Dying(world, Client(world, "dying5", 5)),
        Dying(world, Client(world, "dying4", 4, clean=True)),
    ]


def _retained(world: "World") -> list[Party]:
    return [
        *(Retainer(world, Client(world, f"retains{n}", 5, clean=True)) for n in range(3)),
        *(
            RetainedReader(
                world,
                Client(world, f"reads{n}", 4 + n % 2, clean=n > 0, filters=(("r/#", 2 - n % 2),)),
            )
            for n in range(4)
        ),
    ]


def _movers(world: "World") -> list[Party]:
    return [
        *(
            Mover(world, Client(world, f"mover{n}", 4 + n % 2, filters=(("t/#", qos),)), ("t/",))
            for n, qos in enumerate((1, 1, 1, 1, 2, 2))
        ),
        SlowPublisher(world, Client(world, "pubm", 5)),
    ]


def _travellers(world: "World") -> list[Party]:
    return [
        Traveller(world, "traveller5", 5, 2, 1.5),
        Traveller(world, "traveller4", 4, 1, 2.5),
        Traveller(world, "traveller3", 5, 2, 4.0),
    ]


def _qos0(world: "World") -> list[Party]:
    team = WhisperTeam(world)
    every = (("q/#", 0),)
    return [
        Whisperer(world, Client(world, "whisperer5", 5, clean=True)),
        Whisperer(world, Client(world, "whisperer4", 4, clean=True)),
        Listener(world, Client(world, "listener5", 5, filters=every)),
        Listener(world, Client(world, "listener4", 4, filters=(("q/+", 2),), clean=True)),
        Listener(world, Client(world, "hopper", 5, filters=every, clean=True), hops=True),
        *(
            Listener(world, Client(world, f"turn{n}", 5, filters=(team.filter,), clean=True), team)
            for n in range(3)
        ),
    ]


def _timed(world: "World") -> list[Party]:
    return [
        Delayed(world, Client(world, "delayed", 5), 1),
        Delayed(world, Client(world, "delayed2", 5), 2),
        Delayed(world, Client(world, "short", 5, expiry_s=1), 3),
        Fleeting(world, Client(world, "fleeting1", 5, filters=(("e/#", 1),), expiry_s=1)),
        Fleeting(world, Client(world, "fleeting3", 5, filters=(("e/#", 2),), expiry_s=3)),
        Perishable(world, Client(world, "perishable", 5)),
        PerishableSubscriber(world, Client(world, "sube", 5, filters=(("e/#", 1),))),
    ]


def _queues(world: "World") -> list[Party]:
    one = Team(world, "$stream/@earliest/$queue/s/#", qos=1)
    two = Team(world, "$stream/@earliest/$queue/s/+", qos=2)
    return [
        Member(world, one, "queue5", 5, clean=True, expiry_s=0),
        Member(world, one, "queue4", 4, clean=True),
        Member(world, two, "queues5", 5, clean=True, expiry_s=0),
        Member(world, two, "queues4", 4, clean=True),
        TeamPublisher(world, Client(world, "queuers5", 5)),
        TeamPublisher(world, Client(world, "queuers4", 4)),
    ]


def _scheduled(world: "World") -> list[Party]:
    return [
        Scheduler(world, Client(world, "scheduler5", 5)),
        Scheduler(world, Client(world, "scheduler4", 4)),
        Subscriber(world, Client(world, "subd5", 5, filters=(("d/#", 2),)), ("d/",)),
        Subscriber(world, Client(world, "subd4", 4, filters=(("d/+", 1),)), ("d/",)),
    ]


def _leavers(world: "World") -> list[Party]:
    fickle = Team(world, "$share/fickle/s/#", qos=2)
    lone = LoneTeam(world, "$share/lone/s/#", qos=2)
    stuck = Team(world, "$share/stuck/s/#", qos=2)
    return [
        Leaver(world, fickle, "leaver5", 5),
        Leaver(world, fickle, "leaver4", 4),
        Member(world, fickle, "stayer", 5),
        Absentee(world, lone, "absentee", 5),
        Mute(world, stuck, "mute", 5),
        Member(world, stuck, "unstuck", 5),
        TeamPublisher(world, Client(world, "leavers5", 5)),
        TeamPublisher(world, Client(world, "leavers4", 4)),
    ]


def _devices(world: "World") -> list[Party]:
    return [
        *(
            Device(world, Client(world, f"device{n}", 5, clean=True, expiry_s=LONG_S))
            for n in range(2)
        ),
        *(
            Punctual(world, Client(world, f"punctual{n}", 5, filters=(("e/#", 1),), expiry_s=1))
            for n in range(3)
        ),
    ]


def _groups(world: "World") -> list[Party]:
    kept = Team(world, "$share/kept/s/#", qos=2)
    mixed = Team(world, "$share/mixed/s/#", qos=1)
    once = Team(world, "$share/once/s/+", qos=2)
    return [
        Member(world, kept, "kept5", 5),
        Member(world, kept, "kept4", 4),
        Member(world, kept, "kept", 5, expiry_s=FOREVER),
        Member(world, mixed, "mixed5", 5),
        Member(world, mixed, "mixed4", 4, clean=True),
        Member(world, mixed, "mixed", 5, clean=True),
        Member(world, once, "once5", 5),
        Member(world, once, "once4", 4, clean=True),
        TeamPublisher(world, Client(world, "teams5", 5)),
        TeamPublisher(world, Client(world, "teams4", 4)),
    ]
