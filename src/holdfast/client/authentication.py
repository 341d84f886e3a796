"""Enhanced authentication (MQTT 5, section 4.12) from the client's side."""

from typing import Protocol


class Authentication(Protocol):
    """One exchange. The methods raise AuthenticationFailed."""

    method: str

    def start(self) -> bytes | None:
        """Authentication data for CONNECT (or for the AUTH that starts over)."""

    def step(self, data: bytes | None) -> bytes | None:
        """Answer to the data of an AUTH packet."""

    def finish(self, data: bytes | None) -> None:
        """Check the data that came with success."""
