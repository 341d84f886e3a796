"""Makes tables from messages: `readings`, and the tables made from it.

`TABLES` has all of them with the default rules. `readings_table(RULES)` is the table `readings`
with a user's rules before the default ones.
"""

from holdfast_lake.lake.table import Table
from holdfast_lake.tables.availability import AVAILABILITY, OUTAGES
from holdfast_lake.tables.derived import (
    DEVICE_HOURS,
    DEVICE_MINUTES,
    GAPS,
    LATENCY,
    MISSING,
    QUALITY,
    TOPICS,
)
from holdfast_lake.tables.readings import readings_table
from holdfast_lake.tables.rules import Rule, RuleError

TABLES: list[Table] = [
    readings_table(),
    GAPS,
    DEVICE_MINUTES,
    DEVICE_HOURS,
    MISSING,
    LATENCY,
    QUALITY,
    OUTAGES,
    AVAILABILITY,
    TOPICS,
]

__all__ = ["TABLES", "Rule", "RuleError", "readings_table"]
