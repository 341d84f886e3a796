"""Declares an endpoint of the admin port, and its parameters.

One `Endpoint` per route is the only source of the route itself, of the check of its scope, of the
validation of its parameters and body, and of its part of the OpenAPI document. A module in
`api/routes` has it, and `api/routes/resources.py` adds it::

    LIMIT = Whole("limit", "the most clients of the reply", most=1000, default=100)

    Endpoint("GET", "/api/v1/clients", Scope.VIEWER, "the connected clients", self._list,
             reply=ClientPage, parameters=(LIMIT,))

    async def _list(self, call: Call) -> ClientPage:
        return self._page(call[LIMIT])

A handler returns the value of its reply type, None for `{}`, or a whole Starlette response. It
raises `ApiRefusal` with the status and one line for the caller.
"""

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct
from starlette.requests import Request

from holdfast.numbers import whole_number
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

T = TypeVar("T")
Values = Mapping[str, int | float | str | bool]
"""The values of parameters, by name."""
WHOLE_MAX: Final = 1 << 62
TEXT_CHARACTERS_MAX: Final = 4096
BODY_BYTES_MAX: Final = 262_144
"""The most bytes of a request's body, unless its endpoint says otherwise."""
GIVEN_CHARACTERS_MAX: Final = 300
"""The most characters of one parameter in the audit."""
EVENT_STREAM: Final = "text/event-stream"
"""The content type of a stream. It ends with the credentials of its request."""


class ApiRefusal(Exception):
    """The reason for which a request is not carried out. `status` is its HTTP status."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class LogMoved(ApiRefusal):
    """The log changed while it was read: a partition came to another node. A read that begins again
    finds it there, so `dispatch` repeats the handler of a read."""

    def __init__(self, text: str) -> None:
        super().__init__(503, text, {"Retry-After": "1"})


def bad_request(text: str) -> ApiRefusal:
    """The refusal of a parameter or a body. The text names it and says what is allowed."""
    return ApiRefusal(400, text)


class _Options(Struct, Generic[T], frozen=True, kw_only=True):
    default: T | None = None
    required: bool = False
    in_path: bool = False
    """Whether the value is a part of the path, which makes it required."""


class Parameter(_Options[T], frozen=True):
    """A parameter of the query string or of the path, and the key of its value in a `Call`."""

    name: str
    text: str
    """The meaning, for the OpenAPI document."""

    def parse(self, given: str) -> T:
        """The value of a given text. Raises `ApiRefusal` (400) for one that is not allowed."""
        raise NotImplementedError

    def schema(self) -> Any:
        """The JSON schema of the value."""
        raise NotImplementedError

    def _refusal(self, given: str, allowed: str) -> ApiRefusal:
        return bad_request(f"{self.name}={shown(given)}: {allowed}")


class Whole(Parameter[int], frozen=True, kw_only=True):
    """A whole number with bounds."""

    least: int = 0
    most: int = WHOLE_MAX

    def parse(self, given: str) -> int:
        number = whole_number(given, self.most, self.least)
        if number is None:
            raise self._refusal(given, f"a whole number from {self.least} to {self.most}")
        return number

    def schema(self) -> Any:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


class Number(Parameter[float], frozen=True, kw_only=True):
    """A number with bounds, for example of seconds."""

    least: float = 0.0
    most: float

    def parse(self, given: str) -> float:
        try:
            number = float(given) if given.isascii() and len(given) <= 32 else math.nan
        except ValueError:
            number = math.nan
        if not self.least <= number <= self.most:
            raise self._refusal(given, f"a number from {self.least:g} to {self.most:g}")
        return number

    def schema(self) -> Any:
        return {"type": "number", "minimum": self.least, "maximum": self.most}


class Text(Parameter[str], frozen=True, kw_only=True):
    """A text, or one of the `choices`. An empty one is allowed only with `least` 0."""

    choices: tuple[str, ...] = ()
    least: int = 1
    most: int = TEXT_CHARACTERS_MAX
    """The most characters."""

    def parse(self, given: str) -> str:
        if self.choices and given not in self.choices:
            raise self._refusal(given, f"one of {', '.join(self.choices)}")
        if not self.least <= len(given) <= self.most:
            raise self._refusal(given, f"a text of {self.least} to {self.most} characters")
        return given

    def schema(self) -> Any:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", "minLength": self.least, "maxLength": self.most}


class Flag(Parameter[bool], frozen=True):
    """`true` or `false`."""

    def parse(self, given: str) -> bool:
        if given not in ("true", "false"):
            raise self._refusal(given, "true or false")
        return given == "true"

    def schema(self) -> Any:
        return {"type": "boolean"}


class Caller(Struct, frozen=True):
    """The author of a request."""

    name: str
    """The name for the audit: `user NAME`, `token ID`, or `local` while access is not set up."""
    scope: Scope
    remote: str = ""
    """The IP address."""


class Call:
    """One request to an endpoint, with its validated parameters and body.

    A handler of a change sets `before` and `after`: JSON values, or values that msgspec encodes.
    They go to the audit, so they must not contain a secret.
    """

    def __init__(
        self,
        request: Request,
        endpoint: "Endpoint",
        caller: Caller,
        values: Values,
        body: object = None,
    ) -> None:
        self.request = request
        self.endpoint = endpoint
        self.caller = caller
        self.values = values
        self.before: object = None
        self.after: object = None
        self._body = body

    def __getitem__(self, parameter: Parameter[T]) -> T:
        """The value of a parameter that is required or has a default."""
        value: T = self.values[parameter.name]  # type: ignore[assignment]
        return value

    def get(self, parameter: Parameter[T]) -> T | None:
        """The value of a parameter, or None if it was not given and has no default."""
        value: T | None = self.values.get(parameter.name)  # type: ignore[assignment]
        return value

    @property
    def is_dry(self) -> bool:
        """Whether the request asks only what a change would do."""
        return self.values.get("dry_run") is True or getattr(self._body, "dry_run", False)

    def given(self) -> str:
        """The parameters, and the audited fields of the body, as `name=value` for people. Defaults
        are left out."""
        found = {
            each.name: value
            for each in self.endpoint.parameters
            if (value := self.values.get(each.name)) is not None and value != each.default
        }
        for name in self.endpoint.audited:
            value = getattr(self._body, name)
            if value not in (None, "", 0, False, []):
                found[name] = value
        return " ".join(f"{name}={_as_word(value)}" for name, value in found.items())

    def body(self, kind: type[T]) -> T:
        """The decoded body. `kind` is the `body` type of the endpoint."""
        assert isinstance(self._body, kind)
        return self._body


def _as_word(value: object) -> str:
    """A value as one word, in quotes if it has blanks or special characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > GIVEN_CHARACTERS_MAX:
        text = text[:GIVEN_CHARACTERS_MAX] + "…"
    if not isinstance(value, str) or (text.isprintable() and not set(' "=\\') & set(text)):
        return text
    return json.dumps(text)


Handler = Callable[[Call], Awaitable[object]]


class Endpoint(Struct, frozen=True):
    """One route of the admin port."""

    method: str
    path: str
    """The path, with `{name}` for each parameter that is in it."""
    scope: Scope
    summary: str
    handler: Handler
    reply: Any = None
    """The type of the JSON reply: a dataclass, a Struct, or a type of these. None: `{}`."""
    parameters: tuple[Parameter[Any], ...] = ()
    body: type | None = None
    """The type of the JSON body: a Struct (`forbid_unknown_fields=True`) or a dataclass."""
    body_bytes_max: int = BODY_BYTES_MAX
    refusals: tuple[int, ...] = ()
    """The statuses of its refusals, besides 400, 401, 403 and 413."""
    media_type: str = "application/json"
    """The content type of the reply, if the handler returns a whole response."""
    other_media_types: tuple[str, ...] = ()
    """Further content types of the reply, which the header `Accept` chooses."""
    reads_only: bool = False
    """Whether a POST changes nothing, so that it is not audited."""
    audited: tuple[str, ...] = ()
    """The fields of the body that the audit records. Never one with a secret or a payload."""
    before_users: bool = False
    """Whether it serves processes of the machine while the node does not know the users of the
    cluster that it was told to join."""
    any_parameter: bool = False
    """Whether unknown parameters are ignored, as load balancers and scrapers may send some."""

    @property
    def is_change(self) -> bool:
        """Whether the audit records its requests."""
        return self.method != "GET" and not self.reads_only
