"""An admin port without access control, for tests of its routes."""

from starlette.requests import Request

from holdfast.api.dispatch import remote_of
from holdfast.api.endpoints import Call, Caller, Endpoint
from holdfast.security.access.scopes import Scope


class OpenGate:
    """The gate that gives every caller every scope."""

    async def admit(self, request: Request, endpoint: Endpoint) -> Caller:
        return Caller("local", Scope.ADMIN, remote_of(request))

    def still_admits(self, request: Request, endpoint: Endpoint) -> bool:
        return True

    async def record(self, call: Call, status: int, error: str) -> None:
        """Do nothing."""
