"""`holdfast bench`: what it counts, from when, and what it blames."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.bench.command import bottlenecks
from holdfast.cli.bench.load import Latencies, Load, LoadPlan, Outcomes
from holdfast.cli.main import COMMANDS, build_parser, main
from holdfast.client import Client, Message, Options
from holdfast.testing import Broker

PAGE = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
PLAN = LoadPlan(2, 2, 1, 400.0, 64, 0.8, 0.2, False, "bench-test")
STALL_S = 0.4


def test_latencies_keep_their_precision() -> None:
    latencies = Latencies()
    assert latencies.quantile_us(0.5) is None
    for duration_us in range(-5, 100_000):
        latencies.add(duration_us)
    assert latencies.max_us == 99_999
    for share in (0.0, 0.5, 0.9, 0.99, 0.999, 1.0):
        found = latencies.quantile_us(share)
        assert found is not None
        assert 0.99 * share * 99_999 - 1 <= found <= share * 99_999
    assert len(latencies._buckets) < 2_000


def test_the_command_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(each for each in PAGE.splitlines() if each.startswith("holdfast bench"))
    with Broker() as broker:
        words = line.replace("127.0.0.1:1883", f"127.0.0.1:{broker.port}").split()[1:]
        short = ["--duration", "0.5", "--warm-up", "0.1", "--rate", "200"]
        code = main([*words, *short])
        assert code in (0, 3), capsys.readouterr()
        shown = capsys.readouterr().out
        assert re.search(r"sent 120, acknowledged 120, delivered 120, missing 0", shown)
        assert re.search(r"^delivery +\d+\.\d\d +\d", shown, flags=re.MULTILINE)
        code = main([*words[:2], *short, "-q", "0", "-n", "1", "-s", "3", "--all", "--json"])
        figures = json.loads(capsys.readouterr().out)
        assert code == (3 if figures["bottlenecks"] else 0)
        assert (figures["sent"], figures["delivered"], figures["astray"]) == (120, 360, 0)
        assert figures["delivery_ms"]["p50"] > 0
        assert not figures["acknowledgement_ms"]


def test_refusals_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    acl = "topic read bench/#\n"
    with Broker(acl=acl) as broker:
        server = f"127.0.0.1:{broker.port}"
        arguments = [server, "-d", "0.2", "--warm-up", "0", "-r", "50", "--topic", "bench"]
        assert main(["bench", *arguments]) in (1, 3)
        assert "refused 10: " in capsys.readouterr().out
    assert main(["bench", *arguments]) == 1
    assert f"holdfast: bench: {server}: bench-sub-0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-n", "0"], "--publishers is 1 to 10000"),
        (["--rate", "0"], "--rate is above 0"),
        (["--size", "4"], "--size is 12 to"),
        (["-d", "0"], "--duration is 0.1 to"),
        (["--topic", "a/#"], "--topic is without"),
    ],
)
def test_wrong_options(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert problem in capsys.readouterr().err


def test_a_stall_of_the_broker_is_in_the_latencies() -> None:
    """400 messages a second become due during a stall. A generator that waits for
    acknowledgements would see one late message; this one sees a share of them all."""
    with Broker() as broker:

        def connect(name: str, receive: Callable[[Message], None]) -> Client:
            return Client(
                broker.host, broker.port, options=Options(client_id=name), on_message=receive
            )

        timer = threading.Timer(0.5, broker._loop.call_soon_threadsafe, (time.sleep, STALL_S))
        timer.start()
        outcomes = asyncio.run(Load(PLAN, connect).run())
        timer.join()
    assert outcomes.sent == outcomes.acknowledged == outcomes.delivered == 400
    for latencies in (outcomes.acknowledgement, outcomes.delivery):
        late = latencies.quantile_us(0.9)
        assert late is not None
        assert late > STALL_S * 1e6 / 4
        assert latencies.max_us > STALL_S * 1e6 * 0.9


def test_who_was_the_bottleneck() -> None:
    outcomes = Outcomes(busy=0.5)
    for _ in range(100):
        outcomes.lateness.add(1_000)
    assert not bottlenecks(PLAN, outcomes)
    assert "97% of a core" in bottlenecks(PLAN, replace(outcomes, busy=0.97))[0]
    for _ in range(3):
        outcomes.lateness.add(25_000)
    assert "1 % of the messages 25.0 ms" in bottlenecks(PLAN, outcomes)[0]
    # The broker did not read: the publishers' delay is its own.
    assert not bottlenecks(PLAN, replace(outcomes, waiting=10))


def test_each_option_is_on_the_page() -> None:
    assert "bench" in COMMANDS
    parser = build_parser(["bench"])._subparsers
    assert parser is not None
    actions = parser._group_actions[0].choices["bench"]._actions  # type: ignore[index, call-overload]
    for action in actions:
        for option in action.option_strings:
            assert f"`{option}`" in PAGE or option in ("-h", "--help"), option
