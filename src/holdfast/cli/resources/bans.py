"""`holdfast clients bans`, `ban` and `unban`."""

import argparse
from typing import Final

from holdfast.cli.durations import DAY_S, duration_s

DURATION_S_MAX: Final = 3650 * DAY_S


def add_ban_parsers(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> list[argparse.ArgumentParser]:
    """Adds the parsers of the three actions, and returns them."""
    listing = commands.add_parser("bans", help="list the bans and lock-outs")
    listing.add_argument("--search", metavar="TEXT", help="a part of the name or the reason")
    listing.add_argument("--scope", choices=("client", "user", "address"), help="of this scope")
    listing.add_argument("--kind", choices=("ban", "lockout"), help="of this kind")
    ban = commands.add_parser(
        "ban", help="end the connections of a client, user or address, and refuse new ones"
    )
    unban = commands.add_parser("unban", help="lift a ban and the lock-outs of a name")
    for each in (ban, unban):
        named = each.add_mutually_exclusive_group(required=True)
        named.add_argument("client", metavar="CLIENT", nargs="?", help="the client id")
        named.add_argument("--user", metavar="NAME", help="a user instead")
        named.add_argument(
            "--address", metavar="NET", help="an address or network instead, as 192.0.2.0/24"
        )
    ban.add_argument(
        "--for",
        dest="for_s",
        metavar="TIME",
        type=duration_s(DURATION_S_MAX),
        default=0,
        help="as 90d or 12h (default: until unban)",
    )
    ban.add_argument("--reason", metavar="TEXT", default="", help="a text for the client")
    return [listing, ban, unban]


def ban_request(args: argparse.Namespace) -> dict[str, str | int]:
    """The body of the request that bans a name."""
    wanted: dict[str, str | int] = {
        **banned_name(args),
        "duration_s": args.for_s,
        "reason": args.reason,
    }
    return {name: value for name, value in wanted.items() if value}


def banned_name(args: argparse.Namespace) -> dict[str, str]:
    """The name of a command, by its scope."""
    given = {"client": args.client, "user": args.user, "address": args.address}
    return {name: value for name, value in given.items() if value is not None}
