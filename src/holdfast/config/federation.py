"""The table [federation]: the settings that make a broker, or the sidecar beside one, a member.

See `holdfast.config.schema` for how tables are written down.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field

from holdfast.addresses import ADDRESS, is_any, is_loopback, split_address
from holdfast.config.problem import Problem, shown
from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared

SITE: Final = r"^[A-Za-z0-9_.-]{0,64}$"
"""The names of sites."""
PEER: Final = r"^([0-9a-f]{32}@)?" + ADDRESS[1:]
BROKER_SCHEMES: Final = ("tcp", "ssl", "ws", "wss")


class Federation(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The settings of one member."""

    name: Annotated[str, Meta(min_length=1, max_length=64)] = "federation"
    """The federation's name, the same for all members. Those of another federation are refused."""
    id: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?$", description="32 hexadecimal digits")] = ""
    """The id of this member, for life; empty: made at the first start. A certificate must name
    it."""
    site: Annotated[str, Meta(pattern=SITE, description="up to 64 letters, digits, _, . and -")] = (
        ""
    )
    """The name of this member for people, in the logs, status and metrics of all members. Empty: a
    broker's `node.id` unless that is `n1`, the default; none beside another broker."""
    data: Annotated[str, Meta(min_length=1)] = "holdfast-federation"
    """The directory for the identity and the messages in custody; created when missing."""
    listen: Annotated[
        str, Meta(pattern=rf"^$|{ADDRESS}", description="host:port, or empty to accept no links")
    ] = "127.0.0.1:7883"
    advertise: Annotated[str, Meta(pattern=rf"^$|{ADDRESS}", description="host:port")] = ""
    """The address at which other members reach this one; empty: `listen`."""
    secret_file: str = ""
    """The file of a secret that all members share; each proves to the other that it has it."""
    certificate: str = ""
    """The PEM file with this member's chain, for TLS between members. `key` and `ca` go with it."""
    key: str = ""
    ca: str = ""
    """The PEM file of signers. A peer must present a certificate that one of these has signed, with
    its id as common name or DNS name."""
    signatures: Literal["off", "send", "required"] = "send"
    """The signing of announcements. With a certificate, sign this member's with its key, and check
    others' if they are signed. `required`: ignore every unsigned announcement."""
    peers: list[Annotated[str, Meta(pattern=PEER, description="host:port or id@host:port")]] = (
        field(default_factory=list)
    )
    """The members to be linked with in addition to the manager's."""
    manager: str = ""
    """The URL of the topology manager; empty: none."""
    manager_token_file: str = ""
    """The file whose first line is a join token, or the operator's."""
    manager_ca: str = ""
    """The PEM file of the signers of the manager's certificate; empty: those the system trusts."""
    manager_certificate: str = ""
    """The PEM file to show the manager; `manager_key` goes with it."""
    manager_key: str = ""
    broker: str = ""
    """The URL of this member's broker, like tcp://host:1883, for the manager's probes."""
    labels: list[str] = field(default_factory=list)
    """The labels, each `name=value`, that the manager shows."""
    capacity: Annotated[int, Meta(ge=0, le=64)] = 0
    """The most neighbours that the manager may give this member, 2 or more; 0: its own limit."""
    export_filters: list[str] = field(default_factory=lambda: ["#"])
    """The filters of topics that may leave. Topics that begin with $ and federator/# never
    leave."""
    import_filters: list[str] = field(default_factory=lambda: ["#"])
    """The filters of topics that may come in."""
    degree: Annotated[int, Meta(ge=0, le=16)] = 2
    """The number of links below which a member dials others automatically."""
    redundancy: Annotated[int, Meta(ge=1, le=3)] = 1
    """The number of paths by which a message is sent at once, and accepted from others. Repetitions
    are dropped."""
    queue_messages: Annotated[int, Meta(ge=1, le=1 << 32)] = 100_000
    """The most messages in custody for one other member. `queue_bytes` bounds their bytes."""
    queue_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 256 << 20
    custody_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 42)] = 1 << 30
    """The most bytes in custody for all other members together, in memory and on disk."""
    queue_age_s: Annotated[float, Meta(ge=1, le=1e9)] = 86_400.0
    """The seconds after which a message in custody is dropped."""
    forget_s: Annotated[float, Meta(ge=7200, le=1e9)] = 604_800.0
    """The seconds of silence after which a member counts as gone, and its waiting messages are
    dropped."""
    when_full: Literal["drop-oldest", "wait"] = "drop-oldest"
    """The treatment of a message for a member whose queue is full. Either the oldest there are
    dropped, or it waits, and with it all messages behind it, for any member."""
    link_buffer_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 32)] = 64 << 20
    """The most unsent bytes for one peer. Messages beyond it are dropped, and sent again at QoS 1
    and 2."""
    payload_bytes: Annotated[int, Meta(ge=1, le=268_435_455)] = 268_435_455
    """The most payload bytes of a message on a link of this member, either way. A larger one is
    withheld."""
    messages_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """The most messages per second over each link, in each direction; 0: no limit. Beyond it
    messages of QoS 0 are lost, others are sent again later."""
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """The same limit in bytes of topics, payloads and properties per second."""
    hello_s: Annotated[float, Meta(ge=0.05, le=60)] = 2.0
    """The seconds between heartbeats on a quiet link. After a silence of 1.3 times as long the
    member probes it."""

    @property
    def address(self) -> str:
        """The address at which other members may dial this one, or empty."""
        return self.advertise or self.listen


def federation_problems(settings: Federation) -> Iterator[Problem]:
    """The settings of [federation] that do not go together or are invalid."""
    for key, text in _problems(settings):
        value = getattr(settings, key)
        yield f"federation.{key}", f" = {shown(value)}: {text}"


def peer_of(text: str) -> tuple[str, str]:
    """The id ("" if there is none) and the address of a peer."""
    id, _, address = text.rpartition("@")
    return id, address


def label_of(text: str) -> tuple[str, str]:
    """The name and value of a label."""
    name, _, value = text.partition("=")
    return name, value


def _problems(settings: Federation) -> Iterator[Problem]:
    yield from _address_problems(settings)
    yield from _credential_problems(settings)
    yield from _filter_problems(settings)
    yield from _manager_problems(settings)


def _address_problems(settings: Federation) -> Iterator[Problem]:
    peers = [("peers", peer_of(text)[1]) for text in settings.peers]
    for key, address in [("listen", settings.listen), ("advertise", settings.advertise), *peers]:
        if address and not 1 <= split_address(address)[1] <= 65535:
            yield key, f"the port of {address} must be from 1 to 65535"
    if settings.listen and is_any(split_address(settings.listen)[0]) and not settings.advertise:
        yield (
            "listen",
            "stands for all addresses: set advertise to the one where other members reach this one",
        )


def _credential_problems(settings: Federation) -> Iterator[Problem]:
    names = ("certificate", "key", "ca")
    missing = [name for name in names if not getattr(settings, name)]
    if missing and len(missing) < len(names):
        given = next(name for name in names if getattr(settings, name))
        yield (
            given,
            f"needs {' and '.join(missing)} too: both ends of a link show a certificate and check"
            " the other's",
        )
    if settings.signatures == "required" and not settings.certificate:
        yield "signatures", "needs certificate, key and ca: announcements are signed with that key"
    is_protected = settings.secret_file or settings.ca
    if settings.listen and not is_protected and not is_loopback(split_address(settings.listen)[0]):
        yield (
            "listen",
            "other machines reach this address: set secret_file, or certificate, key and ca, the"
            " same federation's for all members",
        )


def _filter_problems(settings: Federation) -> Iterator[Problem]:
    for key in ("export_filters", "import_filters"):
        for filter in getattr(settings, key):
            try:
                check_filter(filter)
            except InvalidFilter as error:
                yield key, str(error)
                continue
            if is_shared(filter):
                yield key, f"{filter!r} is a shared subscription: give its filter alone"


def _manager_problems(settings: Federation) -> Iterator[Problem]:
    files = ("manager_token_file", "manager_ca", "manager_certificate", "manager_key")
    for key in files:
        if getattr(settings, key) and not settings.manager:
            yield key, "needs manager, the topology manager's URL"
    if bool(settings.manager_certificate) != bool(settings.manager_key):
        given = "manager_certificate" if settings.manager_certificate else "manager_key"
        yield given, "manager_certificate and manager_key go together: one of them is missing"
    elif settings.manager_certificate and not settings.manager.startswith("https://"):
        yield "manager_certificate", "is for a manager whose URL begins with https://"
    for label in settings.labels:
        if not all(label_of(label)):
            yield "labels", f"{label!r} is no label: write name=value"
    if settings.capacity == 1:
        yield "capacity", "a member has at least 2 neighbours"
    if not settings.manager:
        return
    if not _is_url(settings.manager, ("http", "https")):
        yield "manager", "must be a URL as http://host:8080"
    if not settings.broker:
        yield (
            "manager",
            "needs broker, the URL at which it probes this member's broker, as tcp://host:1883",
        )
    elif not _is_url(settings.broker, BROKER_SCHEMES):
        yield "broker", "must be a URL as tcp://host:1883; also ssl, ws, wss"


def _is_url(text: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
