"""The ways of publishing that the Publish Queue benchmark compares, and what they must reach."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    name: str
    what: str
    library: str
    """ "client": our client alone; "queue": its Publish Queue; "paho"."""
    qos: int
    window: int
    store: str = ""
    together: bool = False
    """All puts are begun at once, as by many tasks, instead of one after the other."""
    keeps_session: bool = False
    """The broker keeps the session when the connection is lost. Without that QoS 2 knows after a
    new connection nothing of what it has stored, and a message sent again is stored twice."""
    target: float = 0.0
    """How many times as fast as QoS 2 with window 1 of the same broker; 0: nothing is asked."""


BASELINE = "qos2"
VARIANTS = (
    Variant(BASELINE, "QoS 2, window 1", "client", 2, 1, keeps_session=True),
    Variant("qos2-64", "QoS 2, window 64", "client", 2, 64, keeps_session=True),
    Variant("qos2-clean", "QoS 2, window 1, no session", "client", 2, 1),
    Variant("memory", "queue in memory, window 1", "queue", 1, 1, "memory", target=1.9),
    Variant("memory-64", "queue in memory, window 64", "queue", 1, 64, "memory", target=10.0),
    Variant("sqlite", "queue in SQLite, window 1", "queue", 1, 1, "sqlite"),
    Variant("sqlite-64", "queue in SQLite, window 64", "queue", 1, 64, "sqlite"),
    Variant("sqlite-together", "the same, put by many tasks", "queue", 1, 64, "sqlite", True),
    Variant("paho-qos2", "paho, QoS 2, window 1", "paho", 2, 1, keeps_session=True),
    Variant("paho-qos1", "paho, QoS 1, window 1", "paho", 1, 1, keeps_session=True),
)


def by_name(name: str) -> Variant:
    for variant in VARIANTS:
        if variant.name == name:
            return variant
    raise KeyError(name)
