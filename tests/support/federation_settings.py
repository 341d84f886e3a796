"""The checked settings of a member, from a table."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from holdfast.config.federation import Federation, federation_problems
from holdfast.config.problem import Problem
from holdfast.config.sources import load_settings


class MemberTables(Struct, forbid_unknown_fields=True):
    federation: Federation


def _problems(tables: MemberTables) -> Iterator[Problem]:
    yield from federation_problems(tables.federation)


def member_settings(table: Mapping[str, object] | None = None) -> Federation:
    """The settings of [federation]. Raises `ConfigError`."""
    given = {"federation.name": "federation"} | {
        f"federation.{key}": value for key, value in (table or {}).items()
    }
    return load_settings(MemberTables, _problems, overrides=given).federation
