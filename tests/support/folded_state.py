"""The sessions, queues and groups of a replicated state as plain values, to compare two nodes.

Every field of them counts, also a new one. The fields that each node has for itself are named here,
with the reason.
"""

from collections import deque
from types import GetSetDescriptorType
from typing import Final

from holdfast.node.session.rare_fields import NO_RARITIES, Rarities
from holdfast.node.session.session import Group, Session
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.node.state.replicated import ReplicatedState

OWN: Final = {
    "Session": {
        # Made when they are needed; properties show their fields once more in the compiled form.
        "_key",
        "key",
        "life",
        # Rarities are compared as if each session had some.
        "rare",
        # Whose share of a node's limit the filters count in: after a restart, the present user's.
        "filter_owner",
        # A hint where to look for starts.
        "has_starts",
    },
    # No record says which replays are over.
    "Rarities": {"will_timer", "expiry_timer", "replays_over"},
    # How far this node had delivered when the group began, and how often members came and went.
    "Group": {"start", "changes"},
    # Notes for the coordinator at this node.
    "GroupPositions": {"_state", "version", "_dropped", "applied_ends"},
    "GroupMembers": {"_state", "watched", "unrecorded", "departed"},
}


def sessions_and_groups(images: ReplicatedState) -> dict[str, object]:
    """The fields of all sessions, queues and groups, by name."""
    state = images.state
    assert _public(NO_RARITIES) == _public(Rarities()), "a rare field is set of all sessions"
    for session in state.sessions.values():
        # Completes it.
        images.entry(session)
    found = {f"session {name}": _fields(each) for name, each in state.sessions.items()}
    for name, session in state.sessions.items():
        found[f"rarities {name}"] = _fields(session.rare)
    for key, group in state.groups.items():
        found[f"group {key}"] = _fields(group)
    return {**found, "queues": sorted(state.queues), "tables": _fields(images.groups)}


def _public(thing: object) -> dict[str, object]:
    return {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_")}


def _fields(thing: object) -> dict[str, object]:
    """The fields of an object, those of a compiled class included."""
    kinds = type(thing).__mro__
    names = set(getattr(thing, "__dict__", ()))
    for kind in kinds:
        names |= {name for name, each in vars(kind).items() if type(each) is GetSetDescriptorType}
    names.difference_update(*[OWN.get(kind.__name__, ()) for kind in kinds])
    return {name: _plain(getattr(thing, name)) for name in names if not name.startswith("__")}


def _plain(value: object) -> object:
    """The value in a form that equals that of another node. An empty container is None."""
    if isinstance(value, (type(None), str, bytes, int, bytearray)):
        return value
    if isinstance(value, Session):
        return value.client_id
    if isinstance(value, Group):
        return value.key
    if isinstance(value, FinishedOffsets):
        return {partition: ranges.ranges() for partition, ranges in value.items()} or None
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(each) for key, each in value.items()} or None
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, map(_plain, value))) or None
    if isinstance(value, (list, tuple, deque)):
        return list(map(_plain, value)) or None
    return {"": type(value).__name__, **_fields(value)}
