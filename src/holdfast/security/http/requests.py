"""Decides which requests a port without passwords accepts. Pure.

A browser on the operator's machine reaches loopback addresses, too. A page can make it send
requests in two ways. The page may name the port's address: then the browser adds Origin or
Sec-Fetch-Site. Or the page's own name may change to that address (DNS rebinding): then the browser
takes page and port for one site, but sends the page's name as Host. So the port checks both, for
reads as for changes.
"""

from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Final

ANY_HOST: Final = "*"
TEXT_CHARACTERS_MAX: Final = 100
"""The most characters of a header in a refusal."""


class Hosts:
    """The names by which a port may be addressed: any IP address, localhost, and those given. An IP
    address is safe, because only a page that came from it has it as its own."""

    def __init__(self, names: Iterable[str], setting: str = "") -> None:
        """`names` are without ports; "*" allows all. `setting` is the one with which the operator
        adds names, or ""."""
        self._names = {name.strip("[]").rstrip(".").lower() for name in names} | {"localhost"}
        self._setting = setting

    def refusal(self, sent: Sequence[str]) -> str:
        """The reason to refuse a request with these Host headers, or "". Browsers always send one,
        so a request without any does not come from a page."""
        if ANY_HOST in self._names or not sent:
            return ""
        if len(sent) > 1:
            return "more than one Host header"
        if self.knows(sent[0]):
            return ""
        more = f", or add the name to {self._setting}" if self._setting else ""
        return (
            f"the request is for {shown(sent[0])}, a name that this port does not have: address it"
            f" by IP address{more}"
        )

    def knows(self, host: str) -> bool:
        """Whether a Host header has a name of the port, not counting "*"."""
        name = name_of(host)
        return name in self._names or _is_address(name)


def hosts_of_bind(bind: str) -> Hosts | None:
    """The names of a port without a setting. On a loopback address no client needs a name for it.
    Elsewhere clients do, and any name is allowed (None)."""
    name = bind.strip("[]")
    is_loopback = ip_address(name).is_loopback if _is_address(name) else name == "localhost"
    return Hosts([]) if is_loopback else None


def name_of(host: str) -> str:
    """The name in a Host header, without port and in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def page_refusal(origins: Sequence[str], sites: Sequence[str], hosts: Sequence[str] = ()) -> str:
    """The reason to refuse a request with these Origin and Sec-Fetch-Site headers, or "". A request
    from the address bar has neither, or the site "none". `hosts` are the Host headers of a port
    that serves pages of its own, which may send requests to it. They must be known names of the
    port (`Hosts.knows`). Otherwise a page whose own name changes to this address passes."""
    own = [f"{scheme}://{host.strip().lower()}" for host in hosts for scheme in ("http", "https")]
    if origins and (len(origins) > 1 or origins[0].strip().lower() not in own):
        return f"web pages are not served here, and this request is of {shown(origins[0])}"
    for site in sites:
        if site not in ("none", "same-origin"):
            return f"web pages are not served here, and this request is {shown(site)}"
    return ""


def shown(text: str) -> str:
    """The text of a header, cut and escaped."""
    return repr(text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}...")
