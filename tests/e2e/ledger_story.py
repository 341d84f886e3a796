"""What the ledger knows about a broken promise, in words; times in seconds from the first fault."""

from collections import defaultdict
from typing import Final

from tests.e2e.ledger import Key, Ledger, Violation

STORIES_MAX: Final = 2
"""Of each kind and client."""


def tell_all(ledger: Ledger, violations: list[Violation]) -> list[str]:
    """Lines: how many of each kind and client, and the stories of the first."""
    grouped: dict[tuple[str, str], list[Violation]] = defaultdict(list)
    for violation in violations:
        grouped[violation.kind, violation.who].append(violation)
    lines = []
    for (kind, who), found in grouped.items():
        lines.append(f"{kind}, {who}: {len(found)} times")
        for violation in found[:STORIES_MAX]:
            lines.append(f"  {violation.text}")
            lines += [f"    {line}" for line in _tell(ledger, violation)]
    if lines:
        zero = _zero(ledger)
        lines += [
            f"fault: {one.kind} from {one.from_s - zero:.3f} to {one.to_s - zero:.3f}"
            for one in ledger.faults
        ]
    return lines


def _zero(ledger: Ledger) -> float:
    return ledger.faults[0].from_s if ledger.faults else 0.0


def _tell(ledger: Ledger, violation: Violation) -> list[str]:
    lines = [f"{violation.who}: {_connections(ledger, violation.who)}"]
    key = violation.key
    if key is not None and key in ledger.sent:
        sent, zero = ledger.sent[key], _zero(ledger)
        acknowledged = ledger.acknowledged.get(key)
        answer = "never" if acknowledged is None else f"at {acknowledged - zero:.3f}"
        lines.append(
            f"sent with QoS {sent.qos} at {sent.at_s - zero:.3f}, {sent.sends} times, acknowledged"
            f" {answer}; {key[0]}: {_connections(ledger, key[0])}"
        )
        lines.append(f"delivered: {', '.join(_deliveries(ledger, key)) or 'to nobody'}")
    return lines


def _connections(ledger: Ledger, client: str) -> str:
    """When and to which node; of a group, of each member that is known."""
    zero = _zero(ledger)
    pairs = zip(ledger.connections[client], ledger.nodes[client], strict=True)
    return ", ".join(f"{node} at {at_s - zero:.3f}" for at_s, node in pairs) or "no connections"


def _deliveries(ledger: Ledger, key: Key) -> list[str]:
    zero = _zero(ledger)
    return [
        f"{one.member} at {one.at_s - zero:.3f} on connection {one.connection}"
        + (" with DUP" if one.dup else "")
        for subscription in ledger.subscriptions.values()
        for one in subscription.history
        if one.key == key
    ]
