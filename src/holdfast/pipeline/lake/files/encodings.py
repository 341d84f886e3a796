"""Chooses the Parquet encodings of each table's files."""

from collections.abc import Mapping

from holdfast.pipeline.lake.bronze import ENCODINGS
from holdfast.pipeline.lake.catalog import Catalog
from holdfast.pipeline.lake.folding import fold_encodings
from holdfast.pipeline.lake.table import RECORDS, StreamFold


def encodings_of(catalog: Catalog, name: str) -> Mapping[str, str]:
    """Returns the encodings of a table's files, see WriteSpec."""
    if name == RECORDS:
        return ENCODINGS
    table = catalog.table(name)
    return fold_encodings(table) if isinstance(table.build, StreamFold) else {}
