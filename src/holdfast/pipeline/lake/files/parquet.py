"""Opens Parquet files of the lake, with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.lake.files.errors import LakeError
from holdfast.pipeline.lake.files.files import readable
from holdfast.pipeline.lake.objects.paths import LakePath


@contextmanager
def parquet_file(path: LakePath, **options: Any) -> Iterator[pq.ParquetFile]:
    """Opens a Parquet file. Raises LakeError, also later, if its content is damaged."""
    try:
        with pq.ParquetFile(readable(path), **options) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        # The operating system's errors have a number and a name, and another attempt may succeed.
        is_content = isinstance(error, pa.ArrowException) or (
            type(error) is OSError and error.errno is None
        )
        if not is_content:
            raise
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise LakeError(
            f"{path} is damaged: {first}. Restore it, or build the table again"
        ) from None
