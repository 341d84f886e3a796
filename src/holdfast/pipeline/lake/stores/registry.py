"""Opens a lake's store by name. A package is imported only for the store that needs it."""

from collections.abc import Callable

from pyspark.sql import SparkSession

from holdfast.pipeline.lake.files.files import LakeError
from holdfast.pipeline.lake.objects.paths import LakePath, ObjectPath
from holdfast.pipeline.lake.stores.store import ParquetStore, TableStore


def open_store(name: str, lake: LakePath, session: Callable[[], SparkSession]) -> TableStore:
    """Returns the store of a lake. Raises LakeError if it cannot be used here."""
    if name == "delta":
        try:
            from holdfast.pipeline.lake.stores.delta import DeltaStore
        except ImportError as error:
            raise LakeError(
                f"the store delta needs the package deltalake ({error}): "
                "pip install 'holdfast[spark]'"
            ) from None
        return DeltaStore(lake)
    if name == "iceberg":
        if isinstance(lake, ObjectPath):
            raise LakeError(
                f"the store iceberg needs a directory, and {lake} is in an object store: "
                "choose delta or parquet"
            )
        from holdfast.pipeline.lake.stores.iceberg import IcebergStore

        return IcebergStore(lake, session)
    return ParquetStore(lake)
