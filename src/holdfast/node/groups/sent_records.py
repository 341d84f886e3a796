"""QoS 1 records of one shared group that members have received while their node is alone.

Such a node (`node.alone`) has every member and coordinates every group. So it enters a record in
no table when a member receives it: the inflight entry of the member's session is enough.

Invariant: a record here is unfinished while a member has it inflight or its group has it back, and
finished otherwise. Before anything of another node is handled, `NodeAgent.list_all` enters all of
them in the tables of both sides. Counter-example without that: n2 joins and leads the home of the
group, n1's report lacks record 7, and n2 assigns it again.
"""

from typing import Final

from holdfast.node.session.session import Group

SENT_MAX: Final = 20_000
"""The most records of one group that members receive before its progress is logged."""

Offsets = dict[int, list[int]]
"""The offsets of records by partition, in ascending order."""


class SentRecords:
    """The records that members have received since the progress of the group was last logged, and
    the unfinished ones from before."""

    def __init__(self) -> None:
        self.offsets: Offsets = {}
        # The records since `collect`.
        self.count = 0
        # The finished ones whose CURSOR records are not applied yet.
        self.unlogged: list[Offsets] = []

    def is_empty(self) -> bool:
        return not (self.offsets or self.unlogged)

    def add(self, partition: int, offset: int) -> None:
        offsets = self.offsets.get(partition)
        if offsets is None:
            offsets = self.offsets[partition] = []
        offsets.append(offset)
        self.count += 1

    def collect(self, group: Group | None) -> Offsets:
        """Removes and returns the finished ones. `group`: that of the members here."""
        waiting = {} if group is None else _unfinished(group)
        finished: Offsets = {}
        unfinished: Offsets = {}
        for partition, offsets in self.offsets.items():
            # A record that waited for a member comes after later ones.
            offsets.sort()
            of_members = waiting.get(partition)
            if of_members is not None:
                kept = [offset for offset in offsets if offset in of_members]
                if kept:
                    unfinished[partition] = kept
                    offsets = [offset for offset in offsets if offset not in of_members]
            if offsets:
                finished[partition] = offsets
        self.offsets = unfinished
        self.count = 0
        if finished:
            self.unlogged.append(finished)
        return finished

    def forget(self, logged: Offsets) -> None:
        """Forgets finished records that the log has."""
        self.unlogged = [each for each in self.unlogged if each is not logged]


def _unfinished(group: Group) -> dict[int, set[int]]:
    """The QoS 1 records that members of the group have, or have returned to it."""
    found: dict[int, set[int]] = {}
    for session in group.members:
        for entry in session.inflight.values():
            # An entry that waits for its return to the group has only the tag.
            if entry.group_tag == group.tag and entry.qos == 1:
                found.setdefault(entry.partition, set()).add(entry.offset)
    for each in group.returned:
        found.setdefault(each.partition, set()).add(each.offset)
    for messages in group.deferred.values():
        for message in messages:
            found.setdefault(message.partition, set()).add(message.offset)
    return found
