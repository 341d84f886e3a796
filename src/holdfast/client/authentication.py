"""Enhanced authentication (MQTT 5, section 4.12) on the client's side."""

from typing import Protocol


class Authentication(Protocol):
    """One exchange. A method raises `AuthenticationFailed` if the exchange cannot succeed."""

    method: str

    def start(self) -> bytes | None:
        """The authentication data for CONNECT, or for the AUTH that starts again."""

    def step(self, data: bytes | None) -> bytes | None:
        """The reply to the data of an AUTH packet."""

    def finish(self, data: bytes | None) -> None:
        """Checks the data that came with success."""
