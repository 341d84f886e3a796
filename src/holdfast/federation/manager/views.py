"""Views of the manager in the REST interface."""

from collections import Counter

from holdfast.federation.manager.graph.graph import Link, diameter, structure_of
from holdfast.federation.manager.graph.health import HealthVerdict, MemberState
from holdfast.federation.manager.manager import Manager
from holdfast.federation.manager.messages import HealthView, LinkView, NodeView, TopologyView
from holdfast.federation.manager.state.federation_state import Member


def node_view(manager: Manager, member: Member, verdict: HealthVerdict) -> NodeView:
    ago_s, report = manager.reports.newest(member.id) or (None, None)
    return NodeView(
        id=member.id,
        ip=member.ip,
        uuid=member.uuid,
        certificate=member.certificate,
        epoch=member.epoch,
        advertise=member.advertise,
        labels=member.labels,
        capacity=member.capacity,
        state=verdict.states[member.id].value,
        latency_ms=manager.round_trips.of_members.get(member.id),
        neighbors=manager.state.neighbours(member.id),
        joined_at_s=member.joined_at_s,
        reported_ago_s=ago_s,
        digest=report.digest if report else "",
        interest=report.interest if report else 0,
    )


def node_views(manager: Manager) -> list[NodeView]:
    verdict = manager.verdict()
    return [node_view(manager, each, verdict) for each in manager.state.members.values()]


def topology_view(manager: Manager) -> TopologyView:
    state = manager.state
    graph = state.graph()
    found = structure_of(graph)
    return TopologyView(
        revision=state.revision,
        nodes=node_views(manager),
        links=[_link_view(manager, link) for link in sorted(state.links)],
        forbidden=sorted(state.forbidden),
        articulation_points=sorted(found.articulation_points),
        components=len(found.components),
        diameter=diameter(graph),
    )


def _link_view(manager: Manager, link: Link) -> LinkView:
    return LinkView(
        a=link[0],
        b=link[1],
        pinned=link in manager.state.pinned,
        rtt_ms=manager.round_trips.of_links.get(link),
        up=manager.reports.link_up(link),
    )


def health_view(manager: Manager) -> HealthView:
    verdict = manager.verdict()
    states = Counter(state.value for state in verdict.states.values())
    is_everybody_well = all(
        state in (MemberState.HEALTHY, MemberState.NEW) for state in verdict.states.values()
    )
    problems = list(manager.problems)
    if manager.changes.unknown_because:
        problems.append(f"the database is away: {manager.changes.unknown_because}")
    return HealthView(
        healthy=is_everybody_well and not problems,
        frozen=verdict.is_frozen,
        members=len(manager.state.members),
        states=dict(states),
        problems=problems,
        revision=manager.state.revision,
    )


def dot(manager: Manager) -> str:
    """Returns the graph for Graphviz: filled by health, bold if pinned, dotted if down."""
    verdict = manager.verdict()
    colours = {
        MemberState.HEALTHY: "palegreen",
        MemberState.NEW: "white",
        MemberState.SUSPECT: "khaki",
    }
    lines = ["graph federation {", "  node [shape=box, style=filled];"]
    for member in manager.state.members.values():
        label = _quoted(f"{member.id}\n{member.labels.get('name', member.ip)}")
        colour = colours.get(verdict.states[member.id], "salmon")
        lines.append(f"  {member.id} [label={label}, fillcolor={colour}];")
    for link in sorted(manager.state.links):
        style = "dotted" if manager.reports.link_up(link) is False else "solid"
        if link in manager.state.pinned:
            style += ",bold"
        trip_ms = manager.round_trips.of_links.get(link)
        label = "" if trip_ms is None else f'label="{trip_ms:.1f} ms", '
        lines.append(f'  {link[0]} -- {link[1]} [{label}style="{style}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
