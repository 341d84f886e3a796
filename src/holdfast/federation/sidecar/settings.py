"""The settings of a federator: the table [federation], or the same names as arguments."""

from collections.abc import Mapping
from typing import Self

import msgspec
from msgspec import inspect

from holdfast.config.check import problems
from holdfast.config.federation import Federation, federation_problems
from holdfast.federation.core.config import FederationConfig
from holdfast.federation.core.policy import UNLIMITED, LinkPolicy


class SettingsError(ValueError):
    """The settings cannot be used. `problems` has one line per problem; the text is the first."""

    def __init__(self, *problems: str) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = list(problems)


class Settings(Federation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The validated table [federation]."""

    @classmethod
    def from_table(cls, table: Mapping[str, object], prefix: str = "federation.") -> Self:
        """Convert a table whose keys are fields.

        Raises `SettingsError`, in which every key begins with `prefix`, when a value is not
        allowed.
        """
        wrong = [
            f"{prefix}{key}{text}" for key, text in problems(dict(table), inspect.type_info(cls))
        ]
        if wrong:
            raise SettingsError(*wrong)
        settings = msgspec.convert(table, cls)
        wrong = [f"{key}{text}" for key, text in federation_problems(settings, prefix)]
        if wrong:
            raise SettingsError(*wrong)
        return settings

    @property
    def address(self) -> str:
        """The address at which other members may dial this one, or empty."""
        return self.advertise or self.listen

    def member_config(self) -> FederationConfig:
        """Derive the member's configuration. Its timeouts scale with `hello_s`."""
        asks = FederationConfig.ask_after_s / FederationConfig.hello_s
        sooner = FederationConfig.ask_sooner_s / FederationConfig.hello_s
        return FederationConfig(
            hello_s=self.hello_s,
            ask_after_s=asks * self.hello_s,
            ask_sooner_s=sooner * self.hello_s,
            degree_min=self.degree,
            redundancy=self.redundancy,
            queue_messages_max=self.queue_messages,
            queue_bytes_max=self.queue_bytes,
            custody_bytes_max=self.custody_bytes,
            queue_age_max_s=self.queue_age_s,
            forget_s=self.forget_s,
        )

    def link_policy(self) -> LinkPolicy:
        """Derive the limits that apply to each neighbour."""
        return LinkPolicy(
            payload_bytes_max=self.payload_bytes,
            messages_per_s=self.messages_per_s or UNLIMITED,
            bytes_per_s=self.bytes_per_s or UNLIMITED,
        )
