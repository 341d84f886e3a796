"""The generator process: plays one scenario against one broker and prints a Measurement.

Started by the comparison as `python -m bench.generator SCENARIO PORT PID WARM_UP_S MEASURE_S`.
"""

import json
import select
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from bench import flows, idle, paced
from bench.connection import Connection, Loop
from bench.measurement import Measurement, Sample
from bench.process import raise_open_files_limit
from bench.scenarios import PAYLOAD_BYTES, Figure, Scenario, by_name
from bench.wire import Frame

DRAIN_TIMEOUT_S = 15.0
CONNECTING_MAX = 32
"""Clients that connect at a time."""


def open_flows(scenario: Scenario, ports: Sequence[int], loop: Loop) -> list[flows.Flow]:
    """Connects every client; subscribers first, so that nothing is published unheard. Each topic
    has its publisher at one of the ports, by turns, and its subscribers at the next one."""
    names = [
        name
        for topic in range(scenario.topics)
        for name in (
            *(f"sub-{topic:04}-{index:03}" for index in range(scenario.subscribers)),
            f"pub-{topic:04}",
        )
    ]
    # Mosquitto takes 0.2 s for each WebSocket, and takes many at once.
    with ThreadPoolExecutor(CONNECTING_MAX) as pool:
        opened = pool.map(
            lambda name: Connection(port_of(name, ports), name, scenario.transport), names
        )
        connections = dict(zip(names, opened, strict=True))
    made = []
    for topic in range(scenario.topics):
        frame = Frame(f"bench/{topic:04}", scenario.qos, PAYLOAD_BYTES)
        sinks = []
        for index in range(scenario.subscribers):
            connection = connections[f"sub-{topic:04}-{index:03}"]
            connection.subscribe(f"bench/{topic:04}", scenario.qos)
            sink = flows.SUBSCRIBERS[scenario.qos](connection, frame)
            loop.add(connection, sink.handle)
            sinks.append(sink)
        connection = connections[f"pub-{topic:04}"]
        source = flows.publisher(connection, frame, scenario.window)
        loop.add(connection, source.handle)
        made.append(flows.Flow(source, sinks, lag_max=scenario.lag_max, batch=scenario.batch))
    return made


def port_of(name: str, ports: Sequence[int]) -> int:
    """The port of a client by its name: sub-TOPIC-NUMBER or pub-TOPIC."""
    kind, topic = name.split("-")[:2]
    return ports[(int(topic) + (kind == "sub")) % len(ports)]


def fill_all(active: list[flows.Flow]) -> None:
    """Publishes in turns, one write for each topic at a time, until no flow has room."""
    while active:
        active = [flow for flow in active if flow.fill()]


def drive(made: list[flows.Flow], loop: Loop, duration_s: float, rate: float) -> None:
    """Publishes for some time: to each topic in turn at even intervals, or without a rate as fast
    as the bounds allow."""
    start = time.monotonic()
    sent = 0
    while (now := time.monotonic()) < start + duration_s:
        if not rate:
            fill_all(made)
            loop.run_once(0.1)
        # select(2) waits in microseconds, epoll in ms.
        elif select.select([loop.epoll], [], [], max(0.0, start + sent / rate - now))[0]:
            loop.run_once(0.0)
        elif not made[sent % len(made)].fill():
            raise ValueError("the broker does not keep up")
        else:
            sent += 1


def run_flows(
    scenario: Scenario, port: int, broker_pid: int, warm_up_s: float, measure_s: float
) -> Measurement:
    loop = Loop()
    made = open_flows(scenario, [port], loop)

    def sample_after(duration_s: float) -> Sample:
        drive(made, loop, duration_s, scenario.rate)
        return Sample(broker_pid, sum(flow.delivered() for flow in made))

    return settle(sample_after(warm_up_s).until(sample_after(measure_s)), made, loop)


def settle(measurement: Measurement, made: list[flows.Flow], loop: Loop) -> Measurement:
    """Wait until everything under way has arrived, and count what has not."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while time.monotonic() < deadline and not all(flow.is_settled() for flow in made):
        loop.run_once(0.1)
    unsettled = sum(not flow.is_settled() for flow in made)
    measurement.missing = sum(flow.missing() for flow in made) or unsettled
    loop.close()
    return measurement


def run(
    scenario: Scenario, port: int, broker_pid: int, warm_up_s: float, measure_s: float
) -> Measurement:
    if scenario.connections:
        return idle.run(scenario, port, broker_pid)
    if scenario.figure is Figure.LATENCY:
        return paced.run_latency(scenario, port, broker_pid, warm_up_s, measure_s)
    if scenario.rate and not scenario.qos:
        return paced.run_spread(scenario, port, broker_pid, warm_up_s, measure_s)
    return run_flows(scenario, port, broker_pid, warm_up_s, measure_s)


def main() -> None:
    name, port, broker_pid, warm_up_s, measure_s = sys.argv[1:]
    scenario = by_name(name)
    raise_open_files_limit(
        scenario.connections + scenario.topics * (scenario.subscribers + 1) + 100
    )
    measurement = run(scenario, int(port), int(broker_pid), float(warm_up_s), float(measure_s))
    print(json.dumps(asdict(measurement)))


if __name__ == "__main__":
    main()
