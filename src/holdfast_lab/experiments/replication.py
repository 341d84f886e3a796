"""Checks a cluster's replicas under faults: each has the same messages in the same order.

Two publishers write to one topic, m1 and m2 by turns, while the leader of its partition and a
follower are killed. Afterwards the logs of all nodes are compared, record by record.
"""

import asyncio
import json
import subprocess
from typing import Final

from holdfast.client import ClientError
from holdfast_lab.experiments.traffic import Traffic
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results.store import Result
from holdfast_lab.targets.holdfast import ClusterTarget, HoldfastNode
from holdfast_lab.targets.target import PROGRAM, Fault, Target, TargetError

INTERVAL_S: Final = 0.005
SETTLED: Final = 100
SERVICE_S: Final = 30.0
KILLS: Final = 4
QUICK_KILLS: Final = 1
DUMP_S: Final = 120.0


async def run(target: Target, trial: Trial) -> Result:
    """Kills leaders while two publishers write, then compares the logs of the nodes."""
    kills = trial.choose(QUICK_KILLS, KILLS)
    result = Result(
        "replication", target.name, target.title, target.version(),
        {"replicas": "3", "kills of the leader": str(kills), "publishers": "2"}, {},
    )  # fmt: skip
    if not isinstance(target, ClusterTarget):
        result.problems.append("only a cluster has replicas whose logs can be compared")
        return result
    topic = f"lab/{trial.run}"
    path = trial.directory / f"{trial.run}.jsonl"
    result.events = path.name
    try:
        with (
            ExperimentLog(trial.run, path, parameters={"name": "replication"}) as log,
            ExperimentLog(f"{trial.run}-2", path.with_suffix(".2.jsonl")) as other_log,
        ):
            async with (
                Traffic(target.servers, topic, log, interval_s=INTERVAL_S) as first,
                Traffic(target.servers, topic, other_log, interval_s=INTERVAL_S) as second,
            ):
                for number in range(1, kills + 1):
                    trial.progress((number - 1) / (kills + 1), f"kill {number} of {kills}")
                    if not await first.confirmations(SETTLED, SERVICE_S):
                        raise TargetError("no confirmation although nothing is wrong")
                    log.write("fault_injected", fault=number, kind=str(Fault.KILL))
                    await asyncio.to_thread(target.inject, Fault.KILL, topic)
                    if not await first.confirmations(SETTLED, SERVICE_S):
                        raise TargetError(f"no confirmation within {SERVICE_S:g} s after a kill")
                    result.figures["confirmed with one replica less"] = SETTLED * number
                    await asyncio.to_thread(target.heal)
                    log.write("fault_healed", fault=number)
                observed = [await first.finish(), await second.finish()]
        trial.progress(0.9, "the logs of the nodes are compared")
        for node in target.nodes:
            # A node that runs has written less than it has committed.
            await asyncio.to_thread(node.stop)
        logs = [await asyncio.to_thread(_records, node, topic) for node in target.nodes]
    except (ClientError, TargetError, OSError, subprocess.SubprocessError) as error:
        result.problems.append(str(error))
        return result
    confirmed = sum(len(each.confirmed) for each in observed)
    result.figures["confirmed"] = confirmed
    result.figures["records of the topic on each replica"] = len(logs[0])
    different = sum(found != logs[0] for found in logs[1:])
    result.figures["replicas with another order"] = different
    if different:
        result.broken.append(f"{different} replicas have other records, or another order")
    if len(logs[0]) < confirmed:
        result.broken.append(f"{confirmed - len(logs[0])} confirmed messages are not in the log")
    return result


def _records(node: HoldfastNode, topic: str) -> list[tuple[int, str]]:
    """The offset and payload of each record of the topic in a node's own log."""
    command = [*PROGRAM, "log", "dump", str(node.data), "--json", "--topic", topic]
    command += ["--kind", "message", "--full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, check=False)
    if done.returncode:
        raise TargetError(f"log dump of {node.name}: {done.stderr.strip()}")
    found = (json.loads(line) for line in done.stdout.splitlines())
    return [(record["offset"], record["payload"]) for record in found]
