"""Runs the load of `holdfast bench` against a target, with latencies."""

from typing import Final

from holdfast.cli.bench.command import bottlenecks
from holdfast.cli.bench.load import Latencies, Load, LoadPlan, Outcomes
from holdfast.client import Client, Message, Options
from holdfast_lab.results.store import Series
from holdfast_lab.targets.target import Target

SHARES: Final = (*(number / 100 for number in range(1, 100)), 0.995, 0.999)


async def play(target: Target, plan: LoadPlan) -> tuple[Outcomes, list[str]]:
    """Runs the plan. Returns the outcomes, and why they must not be trusted. Raises `LoadError`."""
    servers = target.servers
    count = 0

    def connect(name: str, receive: object) -> Client:
        """Makes a client that begins with the next node."""
        nonlocal count
        count += 1
        # The clients are spread over the nodes.
        first = count % len(servers)
        take = receive if callable(receive) else _ignore
        return Client(
            servers=[*servers[first:], *servers[:first]],
            options=Options(
                client_id=name,
                level=target.mqtt,
                username=target.user or None,
                password=target.user.encode() or None,
            ),
            on_message=take,
        )

    outcomes = await Load(plan, connect).run()
    return outcomes, bottlenecks(plan, outcomes)


def _ignore(message: Message) -> None:
    """Takes a message and does nothing."""


def distribution(name: str, latencies: Latencies) -> Series:
    """The empirical distribution of latencies: the share that is at most so many milliseconds."""
    points = [(latencies.quantile_us(share) or 0) / 1000 for share in SHARES]
    return Series(name, points, [share * 100 for share in SHARES])


def milliseconds(latencies: Latencies, share: float) -> float | None:
    """A quantile in milliseconds; None without any latency."""
    found = latencies.quantile_us(share)
    return None if found is None else found / 1000
