"""One attempt of a task of the sink, as Spark would make it, but without Spark.

As a program, to be killed: `python -m tests.support.sink_attempt SERVERS ROWS`.
"""

import sys
from collections.abc import Iterator

import pyarrow as pa

from holdfast_lake.sink.identity import stream_job
from holdfast_lake.sink.options import parse
from holdfast_lake.sink.sink import SinkCommit, Task, TaskWriter

TOPICS = 3
BATCH_ROWS = 200
TASK = Task(stream_job("a query of the tests"), 3, 0)


def batches(rows: int) -> Iterator[pa.RecordBatch]:
    """Numbered rows to a few topics."""
    for start in range(0, rows, BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, rows))
        topics = [f"plant/{number % TOPICS}" for number in numbers]
        payloads = [b"%d" % number for number in numbers]
        yield pa.record_batch({"topic": topics, "payload": payloads})


def attempt(
    servers: str, rows: Iterator[pa.RecordBatch], task: Task = TASK, /, **options: str
) -> SinkCommit:
    parsed = parse({"mqttServers": servers, **options}, streaming=True)
    return TaskWriter(parsed, task).write(rows)


if __name__ == "__main__":
    done = attempt(sys.argv[1], batches(int(sys.argv[2])))
    print(done.rows)
