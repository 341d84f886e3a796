"""`holdfast pipeline import` and `replay`: files, retained messages and a lake become messages."""

import argparse
import sys
from pathlib import Path
from typing import Final

from holdfast_lake.cli import options

SCHEMES: Final = ("mqtt://", "mqtts://")
EXIT_BAD_ROWS: Final = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files (.json, .jsonl, .ndjson, .csv, .tsv, .parquet; texts also with .gz), or "
        "mqtt://HOST or mqtts://HOST of another broker, with --retained",
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="SERVER",
        help="where to publish: host:port or mqtts://host:port, several with commas",
    )
    parser.add_argument(
        "--topic", metavar="TOPIC", help="topic of the rows; {name} stands for a field of the row"
    )
    parser.add_argument(
        "--payload",
        metavar="FIELD",
        help="field that is the payload (default: a JSON object of all fields not in the topic)",
    )
    parser.add_argument(
        "--time",
        metavar="FIELD",
        help="field of the row, or of a JSON payload, with the time, which the payload gets as ts; "
        "now: no time is added (default: the payload has ts, timestamp, time or event_time)",
    )
    parser.add_argument("--format", choices=("json", "csv", "parquet"), help="format of the files")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out rows that can be no message (default: nothing is imported)",
    )
    parser.add_argument("--check", action="store_true", help="only read the files and check them")
    parser.add_argument(
        "--retained", action="store_true", help="import the retained messages of a broker"
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="FILTER",
        help="--retained: only these topics (default #); may be given again",
    )
    parser.add_argument(
        "--quiet-for",
        type=options.duration_s,
        default=2.0,
        metavar="TIME",
        help="--retained: the messages are complete when none has come for this time (default 2s)",
    )
    for prefix, where in (("", "--to"), ("from-", "the other broker")):
        _add_login(parser, prefix, where)
    _add_format(parser)


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--zone", help="zone of times that name none, such as Europe/Berlin (UTC)")
    parser.add_argument(
        "--time-format",
        metavar="FORMAT",
        help="format of times as texts, such as '%%d/%%m/%%Y %%H:%%M'",
    )
    parser.add_argument(
        "--delimiter",
        type=_delimiter,
        metavar="CHARACTER",
        help="between the fields of CSV: one character, or tab (default: by the first line)",
    )
    parser.add_argument(
        "--decimal",
        choices=(",", "."),
        default="",
        metavar="CHARACTER",
        help="decimal separator in CSV (default .)",
    )


def _delimiter(text: str) -> str:
    text = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is no delimiter: one character, or tab")
    return text


def _add_login(parser: argparse.ArgumentParser, prefix: str, where: str) -> None:
    parser.add_argument(f"--{prefix}username", metavar="NAME", help=f"user at {where}")
    parser.add_argument(
        f"--{prefix}password-file", type=Path, metavar="FILE", help="file of the password"
    )
    parser.add_argument(
        f"--{prefix}ca-file", metavar="FILE", help=f"PEM file of the signers for {where}"
    )


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lake", metavar="LAKE", help="directory or s3://bucket/prefix of the lake")
    parser.add_argument(
        "--broker",
        required=True,
        metavar="SERVER",
        dest="to",
        help="where to publish: host:port or mqtts://host:port, several with commas",
    )
    for name, which in (
        ("from", "first time of storing"),
        ("to", "end of these times, or the last day, included"),
    ):
        parser.add_argument(
            f"--{name}",
            metavar="TIME",
            dest=f"{name}_time",
            help=f"{which}: ISO 8601, or -15m (default: all)",
        )
    parser.add_argument(
        "--topics",
        action="append",
        metavar="FILTER",
        help="only these topics (default #); may be given again",
    )
    _add_login(parser, "", "--broker")


def replay(args: argparse.Namespace) -> int:
    """Publishes messages of a lake again."""
    from holdfast_lake.imports.files import replay_lake
    from holdfast_lake.imports.rows import ImportFailed
    from holdfast_lake.source.options import OptionError

    try:
        count = replay_lake(
            args.lake, args.topics or ["#"], args.from_time, args.to_time, _target(args)
        )
    except (ImportFailed, OptionError) as error:
        return _failed(error, "--broker")
    print(f"{args.lake}: {count:,} messages are in the log of {args.to}")
    return 0


def import_past(args: argparse.Namespace) -> int:
    """Imports files, or the retained messages of a broker."""
    from holdfast_lake.imports.rows import ImportFailed
    from holdfast_lake.source.options import OptionError

    of_broker = [each for each in args.sources if each.startswith(SCHEMES)]
    try:
        if of_broker or args.retained:
            return _import_retained(args, of_broker)
        return _import_files(args)
    except (ImportFailed, OptionError) as error:
        return _failed(error, "--to" if not of_broker else "the address")


def _failed(error: Exception, option: str) -> int:
    """Prints an error with the command's option in place of that of the sink."""
    print(f"holdfast: {str(error).replace('mqttServers', option)}", file=sys.stderr)
    return EXIT_BAD_ROWS


def _import_retained(args: argparse.Namespace, of_broker: list[str]) -> int:
    from holdfast_lake.imports.files import import_retained
    from holdfast_lake.imports.rows import ImportFailed

    if not args.retained or len(args.sources) != 1 or not of_broker:
        raise ImportFailed(
            "--retained imports the retained messages of one broker, such as mqtt://host:1883. The "
            "log of a Holdfast broker is read by a federation or by the pipeline"
        )
    source = {"mqttServers": of_broker[0], **_login(args, "from_")}
    filters = args.filter or ["#"]
    done = import_retained(source, _target(args), filters, args.quiet_for)
    print(
        f"{of_broker[0]} retains {done.found:,} messages: {done.published:,} imported, "
        f"{done.found - done.published:,} were there already"
    )
    return 0


def _import_files(args: argparse.Namespace) -> int:
    from holdfast_lake.imports.files import BAD_SHOWN, FileImport
    from holdfast_lake.imports.rows import CsvFormat, ImportFailed, ImportRule

    if not args.topic:
        raise ImportFailed("where do the rows go? Give --topic, such as 'plant/{line}/{device}'")
    rule = ImportRule(args.topic, args.payload, args.time, args.zone, args.time_format)
    form = CsvFormat(args.delimiter or "", args.decimal)
    files = [FileImport(Path(each), rule, args.format or "", form) for each in args.sources]
    for file in files:
        file.check()
        for example in file.examples:
            print(f"holdfast: {example}", file=sys.stderr)
        if file.names_no_zone:
            hint = "times without a zone are taken as UTC: --zone Europe/Berlin names another one"
            print(f"hint: {file.path}: {hint}", file=sys.stderr)
        if file.bad > BAD_SHOWN:
            print(f"holdfast: {file.path}: and {file.bad - BAD_SHOWN:,} more", file=sys.stderr)
    bad = sum(file.bad for file in files)
    if bad and not args.skip_bad:
        raise ImportFailed(
            f"{bad:,} rows can be no messages, so nothing was imported. Mend them, or leave them "
            "out with --skip-bad"
        )
    for file in files:
        rows = file.good if args.check else file.publish(_target(args))
        what = "could be imported" if args.check else "are in the log"
        more = f", {file.bad:,} left out" if file.bad else ""
        print(f"{file.path}: {rows:,} rows of {file.topics} topics {what}{more}", flush=True)
    return 0


def _target(args: argparse.Namespace) -> dict[str, str]:
    return {"mqttServers": args.to, **_login(args, "")}


def _login(args: argparse.Namespace, prefix: str) -> dict[str, str]:
    """Returns the options of the sink for a login. Raises ImportFailed."""
    from holdfast_lake.imports.rows import ImportFailed

    found: dict[str, str | None] = {
        "username": getattr(args, f"{prefix}username"),
        "tlsCaFile": getattr(args, f"{prefix}ca_file"),
    }
    file = getattr(args, f"{prefix}password_file")
    if file is not None:
        try:
            found["password"] = file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ImportFailed(f"{file} cannot be read: {error}") from None
    return {name: value for name, value in found.items() if value is not None}
