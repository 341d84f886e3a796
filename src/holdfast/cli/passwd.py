"""`holdfast passwd`: add, change and delete users, with the options of mosquitto_passwd.

The file is replaced as a whole (write, fsync, rename). A broker that reads it meanwhile sees either
the old users or the new ones. Comments, order and other users' lines stay unchanged.
"""

import argparse
import getpass
import os
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.security import passwords, scram_file
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.edit import new_document, set_password
from holdfast.security.dynamic.file import DynamicSecurityFile, write
from holdfast.security.files import replace_file
from holdfast.security.passwords import PasswordError
from holdfast.security.scram_file import ScramError

_EPILOG: Final = """\
Without -b the password is asked for twice, or read as one line from standard input when that is
not a terminal. Mosquitto 2.0 reads sha512-pbkdf2 (with any iterations) and sha512; argon2id needs
Mosquitto 2.1. With the default iterations a connection costs the broker about 7 ms: raise them
for passwords that people choose. A new file is readable by its owner only; an existing one keeps
its owner and mode."""


class PasswordInputError(Exception):
    """The command cannot do its work. The text goes to standard error, the exit code is 1."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "passwd",
        help="manage a password file",
        description="Manage a password file (Mosquitto's format) or a SCRAM file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-H HASH] [-I N] [--scram | --scram-sha-512] [-c | -D] FILE USER\n"
        "       %(prog)s [-H HASH] [-I N] [--scram | --scram-sha-512] [-c] -b FILE USER PASSWORD\n"
        "       %(prog)s [-H HASH] [-I N] -U FILE\n"
        "       %(prog)s --dynamic-security [-c] [-b] FILE USER [PASSWORD]",
    )
    parser.add_argument("-b", dest="batch", action="store_true", help="PASSWORD is an argument")
    parser.add_argument(
        "-c", dest="create", action="store_true", help="a new file; an existing one is overwritten"
    )
    parser.add_argument("-D", dest="delete", action="store_true", help="delete the user")
    parser.add_argument(
        "-U", dest="upgrade", action="store_true", help="hash the plain passwords in FILE"
    )
    parser.add_argument(
        "-H",
        dest="scheme",
        metavar="HASH",
        choices=passwords.SCHEMES,
        help=f"{', '.join(passwords.SCHEMES)} (default: {passwords.DEFAULT_SCHEME})",
    )
    parser.add_argument(
        "-I",
        dest="iterations",
        metavar="N",
        type=int,
        help=f"iterations of sha512-pbkdf2 (default: {passwords.DEFAULT_ITERATIONS}) "
        f"or of --scram (default: {scram_file.DEFAULT_ITERATIONS})",
    )
    for option, method in zip(("--scram", "--scram-sha-512"), scram_file.HASHES, strict=True):
        parser.add_argument(
            option,
            dest="scram",
            action="store_const",
            const=method,
            help=f"FILE holds credentials for {method}",
        )
    parser.add_argument(
        "--dynamic-security",
        dest="dynamic",
        action="store_true",
        help="FILE is security.dynamic_security_file; with -c a new one, in which USER may send "
        "commands",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("user", metavar="USER", nargs="?")
    parser.add_argument("password", metavar="PASSWORD", nargs="?")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 1 with one line on standard error if it cannot do its work."""
    try:
        _check_usage(args)
        if args.upgrade:
            _upgrade(args)
        elif args.dynamic:
            _set_dynamic(args)
        elif args.delete:
            _delete(args.file, args.user)
        else:
            _set(args)
    except (PasswordInputError, PasswordError, ScramError, DynamicSecurityError) as error:
        print(f"holdfast passwd: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"holdfast passwd: {args.file}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _check_usage(args: argparse.Namespace) -> None:
    if sum((args.create, args.delete, args.upgrade)) > 1:
        raise PasswordInputError("choose one of -c, -D and -U")
    if args.upgrade:
        if args.batch or args.scram or args.dynamic or args.user is not None:
            raise PasswordInputError("-U takes FILE only, without -b, --scram, --dynamic-security")
        return
    if args.user is None:
        raise PasswordInputError("name the user: FILE USER")
    if args.dynamic and (args.scram or args.scheme or args.iterations or args.delete):
        raise PasswordInputError("--dynamic-security goes with -b and -c only")
    if args.scram and args.scheme:
        raise PasswordInputError("-H is for password files, --scram has one hash only")
    if args.batch and args.delete:
        raise PasswordInputError("choose one of -b and -D")
    if args.batch and args.password is None:
        raise PasswordInputError("-b needs FILE USER PASSWORD")
    if args.password is not None and not args.batch:
        raise PasswordInputError("a password on the command line is visible to others: it needs -b")
    _check_username(args.user)


def _check_username(username: str) -> None:
    if (
        not username
        or ":" in username
        or not username.isprintable()
        or username != username.strip()
    ):
        raise PasswordInputError(
            "a user name has no ':', no control character, and no space at its ends, "
            f"found {username!r}"
        )
    if username.startswith("#"):
        raise PasswordInputError(
            f"a user name that begins with '#' would be a comment: {username!r}"
        )
    if len(username.encode()) > passwords.USERNAME_BYTES_MAX:
        raise PasswordInputError(f"a user name has at most {passwords.USERNAME_BYTES_MAX} bytes")


def _set(args: argparse.Namespace) -> None:
    lines = [] if args.create else _read_lines(args.file)
    password = args.password if args.batch else ask_password()
    if args.scram:
        username = scram_file.saslprep(args.user)
        iterations = scram_file.DEFAULT_ITERATIONS if args.iterations is None else args.iterations
        text = scram_file.make_credentials(password, iterations, method=args.scram).format()
        if not lines:
            lines.append(scram_file.new_decoy_line())
    else:
        username = args.user
        text = _hash(args, password)
    line = f"{username}:{text}"
    # A user of a SCRAM file may have a line of each method.
    places = _places(lines, username, f"{args.scram}$" if args.scram else "")
    if places:
        lines[places[0]] = line
    else:
        lines.append(line)
    _replace(args.file, lines)


def _set_dynamic(args: argparse.Namespace) -> None:
    password = args.password if args.batch else ask_password()
    if args.create:
        write(args.file, new_document(args.user, password))
        return
    file = DynamicSecurityFile.load(args.file)
    set_password(file.document, args.user, password)
    file.replaced(file.document)


def _hash(args: argparse.Namespace, password: str) -> str:
    scheme = args.scheme or passwords.DEFAULT_SCHEME
    iterations = passwords.DEFAULT_ITERATIONS if args.iterations is None else args.iterations
    return passwords.hash_password(password, scheme, iterations)


def _delete(path: Path, username: str) -> None:
    lines = _read_lines(path)
    places = _places(lines, username)
    if not places:
        raise PasswordInputError(f"{path} has no user {username!r}")
    _replace(path, [line for number, line in enumerate(lines) if number not in places])


def _upgrade(args: argparse.Namespace) -> None:
    lines = _read_lines(args.file)
    for number, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            continue
        username, colon, password = line.partition(":")
        if not username or not colon or not password:
            raise PasswordInputError(
                f"{args.file}:{number + 1}: a line is 'user:password' or a comment"
            )
        # Skips hashes, so that a second run does not hash them again.
        if not passwords.is_hash(password):
            lines[number] = f"{username}:{_hash(args, password)}"
    _replace(args.file, lines)


def _places(lines: list[str], username: str, hash: str = "") -> list[int]:
    start = f"{username}:{hash}"
    return [number for number, line in enumerate(lines) if line.startswith(start)]


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PasswordInputError(f"{path} does not exist; -c creates it") from None
    except UnicodeDecodeError as error:
        raise PasswordInputError(f"{path}: not UTF-8 at byte {error.start}") from None
    lines = [line.rstrip("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def ask_password() -> str:
    """A password from the terminal, or one line of standard input. Raises `PasswordInputError`."""
    if not sys.stdin.isatty():
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        try:
            password = getpass.getpass("Password: ")
            again = getpass.getpass("Reenter password: ")
        except EOFError:
            password = again = ""
        if password != again:
            raise PasswordInputError("the passwords do not match")
    if not password:
        raise PasswordInputError("the password is empty")
    return password


def _replace(path: Path, lines: list[str]) -> None:
    """Writes the file under another name and renames it. Symbolic links are followed."""
    path = Path(os.path.realpath(path))
    content = [f"{line}\n".encode() for line in lines]
    replace_file(path, content, partial(_keep_owner_and_mode, path))


def _keep_owner_and_mode(path: Path, descriptor: int) -> None:
    """Copies owner and mode, because the broker may run as another user than the editor."""
    try:
        old = path.stat()
    except FileNotFoundError:
        return
    new = os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
    if old.st_mode & stat.S_IROTH:
        print(f"holdfast passwd: {path} is readable by everyone: chmod o= it", file=sys.stderr)
