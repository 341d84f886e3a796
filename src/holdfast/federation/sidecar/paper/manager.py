"""Client of the topology manager in the published protocol: joins, then checks regularly.

A check asks whether the member is still registered, and for all its neighbours. The published
manager has no request except the join, and treats a second join as another member. `holdfast
federation manager` supports the check, and returns the same id to a member that joins again.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from holdfast.config.problem import ConfigError
from holdfast.federation.manager.messages import JoinAnswer, Neighbor, Watched
from holdfast.federation.paper.config import PaperConfig
from holdfast.federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from holdfast.federation.sidecar.paper.settings import PaperSettings
from holdfast.federation.sidecar.settings import JOIN_PATH
from holdfast.io.peers.complaints import Complaints

TIMEOUT_S: Final = 15.0
"""The time in seconds for a request. A join includes the manager's probe of the broker."""
RETRY_S: Final = 0.5
"""The first delay in seconds between attempts. It doubles up to RETRY_S_MAX."""
RETRY_S_MAX: Final = 30.0
NO_SUCH_MEMBER: Final = 404


@dataclass(frozen=True)
class AssignedMember:
    """The identity, configuration and neighbours that the manager assigns."""

    id: int
    config: PaperConfig
    neighbours: dict[int, str]
    """The addresses of the neighbours' brokers by member id."""

    def is_same_member(self, other: "AssignedMember") -> bool:
        return (self.id, self.config) == (other.id, other.config)


class PaperManager:
    """The member's client of its topology manager."""

    def __init__(self, settings: PaperSettings, complaints: Complaints) -> None:
        """Reads token and certificates. Raises `ConfigError` or `TlsError` if that fails."""
        self.is_reached = False
        self._settings = settings
        self._http = ManagerHttp(
            settings.manager,
            settings.manager_ca,
            settings.manager_certificate,
            settings.manager_key,
        )
        self._token = settings.manager_token()
        self._complaints = complaints

    async def join(self) -> AssignedMember:
        """Joins, repeating the request until the manager replies."""
        wait_s = RETRY_S
        while True:
            try:
                return await self._join()
            except (ManagerUnreachable, ManagerRefuses) as error:
                self.is_reached = False
                self._complaints.say("manager", str(error), f"cannot join: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    async def neighbours(self, id: int) -> dict[int, str] | None:
        """Returns the neighbours of a member, or None while the manager is unreachable.

        Raises `ManagerRefuses`, with status 404 if there is no such member.
        """
        path = f"/api/v1/watch?since=0&timeout=0&node={id}"
        try:
            data = await self._http.request("GET", path, None, self._token, TIMEOUT_S)
            watched = msgspec.convert(data, Watched)
        except (ManagerUnreachable, msgspec.ValidationError) as error:
            self.is_reached = False
            self._complaints.say("manager", "unreachable", f"the manager is not asked: {error}")
            return None
        except ManagerRefuses as error:
            self.is_reached = error.status == NO_SUCH_MEMBER
            raise
        self._reached()
        return _addresses(watched.neighbors or [])

    async def _join(self) -> AssignedMember:
        body = {"ip": self._settings.advertised}
        data = await self._http.request("POST", JOIN_PATH, body, self._token, TIMEOUT_S)
        try:
            answer = msgspec.convert(_convert(data), JoinAnswer)
            config = self._settings.config(
                answer.core_ann_interval / 1e9, answer.beacon_interval / 1e9, answer.redundancy
            )
        except (msgspec.ValidationError, ConfigError) as error:
            raise ManagerUnreachable(f"{self._http.url}: no answer to a join: {error}") from None
        self._reached()
        return AssignedMember(answer.id, config, _addresses(answer.neighbors))

    def _reached(self) -> None:
        self.is_reached = True
        self._complaints.forget("manager")


def _convert(data: Any) -> Any:
    """Converts a response of the published manager: `Id`, `Ip`, and null for no neighbours."""
    if not isinstance(data, dict) or not isinstance(data.get("neighbors"), list | None):
        return data
    neighbours = [
        {str(name).lower(): value for name, value in each.items()}
        if isinstance(each, dict)
        else each
        for each in data.get("neighbors") or []
    ]
    return data | {"neighbors": neighbours}


def _addresses(neighbours: list[Neighbor]) -> dict[int, str]:
    return {each.id: each.ip for each in neighbours}
