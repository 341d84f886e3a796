"""Names of sites spread to every member, end, and never break a link."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast_federation.core.frames import MEMBERS_MAX
from holdfast_federation.sidecar.links import identity_of
from holdfast_federation.sidecar.site_names import NAMES_PER_FRAME, SiteNames
from tests.support.scripted_edge import until
from tests.unit.federation.sidecar.test_links import Member, run

A, B, C = b"\x01" * 16, b"\x02" * 16, b"\x03" * 16


def frame(*names: tuple[bytes, int, str]) -> bytes:
    return msgspec.msgpack.encode(names)


def test_a_newer_start_replaces_a_name_and_nothing_else_does() -> None:
    names = SiteNames(A, 3, "oslo")
    assert names.receive(frame((B, 2, "bergen")))
    assert names.name_of(B) == "bergen"
    assert names.receive(frame((B, 2, "other"), (B, 1, "older"), (A, 9, "forged"))) == b""
    assert names.receive(frame((B, 3, "hamar")))
    assert names.by_id() == {A.hex(): "oslo", B.hex(): "hamar"}


def test_only_news_are_passed_on() -> None:
    names = SiteNames(A, 3, "")
    assert list(names.frames()) == []
    names.receive(frame((B, 1, "bergen")))
    assert names.receive(frame((B, 1, "bergen"), (C, 1, "hamar"))) == frame((C, 1, "hamar"))


def test_names_are_bounded_and_keep_the_own_one() -> None:
    names = SiteNames(A, 1, "oslo")
    for start in range(0, 2 * MEMBERS_MAX, NAMES_PER_FRAME):
        batch = [(number.to_bytes(16), 1, "x") for number in range(start + 10, start + 10 + 256)]
        assert names.receive(frame(*batch))
    assert len(names.by_id()) == MEMBERS_MAX
    assert names.name_of(A) == "oslo"
    assert all(len(payload) < 64_000 for payload in names.frames())


@given(st.binary(max_size=400))
def test_garbage_is_ignored(payload: bytes) -> None:
    names = SiteNames(A, 1, "oslo")
    names.receive(payload)
    assert names.name_of(A) == "oslo"


def test_a_name_that_could_hurt_a_terminal_is_ignored() -> None:
    names = SiteNames(A, 1, "oslo")
    for name in ("", "\x1b[2J", "a b", "x" * 65, 'a"'):
        assert names.receive(frame((B, 1, name))) == b""


def test_names_cross_members_that_are_not_linked() -> None:
    async def test() -> None:
        members = [
            await Member(node, identity=identity_of(node, "f", "127.0.0.1:1", site)).start()
            for node, site in ((A, "oslo"), (B, ""), (C, "hamar"))
        ]
        one, middle, other = members
        one.links.dial(B, middle.address)
        other.links.dial(B, middle.address)
        wanted = {A.hex(): "oslo", C.hex(): "hamar"}
        await until(lambda: all(each.links.names.by_id() == wanted for each in members), "names")
        link = middle.links.linked()[A]
        assert link.peer is not None
        assert link.peer.site == "oslo"

    run(test)
