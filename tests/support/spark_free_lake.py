"""A lake whose steps are small enough for the driver alone, so that no Spark is started.

Only `records` and `readings` can be made this way. Spark is asked for its settings.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow.parquet as pq

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import readable
from holdfast_lake.lake.lake import Lake


def no_spark() -> Any:
    """What stands for a session of Spark."""
    context = SimpleNamespace(
        defaultParallelism=2, master="local[2]", setLocalProperty=lambda *_: None
    )
    return SimpleNamespace(conf=SimpleNamespace(get=lambda _: "UTC"), sparkContext=context)


def rows(lake: Lake, name: str, days: list[str] | None = None) -> Counter[Any]:
    """The rows of a table as of its newest commit, of some days."""
    log = CommitLog(lake.path, name)
    last = log.last()
    found: Counter[Any] = Counter()
    for file in log.live(last.version) if last is not None else ():
        if days is None or file.partition["date"] in days:
            table = pq.read_table(readable(lake.path / file.path), partitioning=None)
            found.update(
                (file.partition["date"], *map(str, row.values())) for row in table.to_pylist()
            )
    return found


def forget_offsets(log: CommitLog) -> int:
    """Makes the commits those of an older version, which did not note the offsets of files."""
    for version in log.kept():
        commit = log.read(version)
        files = [msgspec.structs.replace(file, offsets={}) for file in commit.files]
        text = msgspec.json.encode(msgspec.structs.replace(commit, files=files, begins={}))
        (log.directory / f"{version:08}.json").write_bytes(text)
    log.live(0)
    return log.kept()[-1]


def state(lake: Lake) -> dict[str, str]:
    """The state of `readings`, by stream."""
    last = CommitLog(lake.path, "readings").last()
    return {
        row["stream"]: row["state"]
        for file in (last.state if last is not None else ())
        for row in pq.read_table(readable(lake.path / file.path)).to_pylist()
    }
