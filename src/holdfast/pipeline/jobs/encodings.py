"""Parquet encodings of the files of each table."""

from collections.abc import Mapping

from holdfast.pipeline.jobs.bronze import ENCODINGS
from holdfast.pipeline.jobs.catalog import Catalog
from holdfast.pipeline.jobs.folding import fold_encodings
from holdfast.pipeline.jobs.table import RECORDS, StreamFold


def encodings_of(catalog: Catalog, name: str) -> Mapping[str, str]:
    """Those that a table's files have, see WriteSpec."""
    if name == RECORDS:
        return ENCODINGS
    table = catalog.table(name)
    return fold_encodings(table) if isinstance(table.build, StreamFold) else {}
