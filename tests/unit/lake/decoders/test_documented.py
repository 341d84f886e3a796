"""docs/tables.md says what the declarations say."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from holdfast_lake.decoders import decoded
from holdfast_lake.decoders.text_payload import TEXT_LENGTH_MAX
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.table import Table
from holdfast_lake.tables import TABLES, Rule, availability, readings_table, stream
from holdfast_lake.tables.rules import DECODERS, DEFAULT_RULES
from tests.support.table_docs import rendered

PAGE = (Path(__file__).parents[4] / "docs" / "tables.md").read_text()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_is_documented(table: Table) -> None:
    assert rendered(table) in PAGE


def test_no_other_table_is_documented() -> None:
    assert re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE) == [table.name for table in TABLES]


def test_every_decoder_and_field_of_a_rule_is_documented() -> None:
    for name in DECODERS:
        assert f"`{name}`" in PAGE
    for name in Rule.__dataclass_fields__:
        assert f"`{name}`" in PAGE


def test_codes_are_documented() -> None:
    for code, meaning in decoded.CODES.items():
        assert f"| `{code}` | {meaning} |" in PAGE
    assert f"at most {stream.NOISE_MAX} rows" in PAGE


def test_bounds_are_documented() -> None:
    for bound in (
        f"{decoded.PAYLOAD_BYTES_MAX >> 20} MiB", f"{decoded.READINGS_MAX:,} readings",
        f"{decoded.DEPTH_MAX} levels", f"{TEXT_LENGTH_MAX:,} characters",
        f"{stream.SEEN_MAX} ids", f"{stream.GAPS_MAX} open gaps", f"{stream.REORDER_MAX:,}",
        f"{stream.JUMP_MAX:,}", f"{availability.SILENCE_FACTOR} usual intervals",
        f"fewer than {availability.INTERVALS_MIN} are",
        f"more than {availability.SPREAD_MAX} times",
        f"more than {availability.SILENCES_MIN} and more than one in {availability.SILENCES_OF}",
    ):  # fmt: skip
        assert bound in PAGE, bound


def test_the_tables_fit_together() -> None:
    assert set(Catalog(TABLES).names()) == {"records", *(table.name for table in TABLES)}
    mine = readings_table((Rule("a/#", decode="json"),))
    assert mine.columns == TABLES[0].columns
    assert DEFAULT_RULES[-1].filter == "#"
