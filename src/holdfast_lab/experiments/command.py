"""`holdfast lab`: the experiments of the five papers, on any broker, by one command.

Exit codes: 0 done; 1 a promise was broken, or nothing could be measured; 2 wrong usage; 130
interrupted, with what was measured so far kept.
"""

import argparse
import asyncio
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.cli.text import table
from holdfast_lab.experiments import EXPERIMENTS, Experiment
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.results import document, pages, store
from holdfast_lab.results.figures import MAIN, figure
from holdfast_lab.results.store import LabRun, Result, ResultError
from holdfast_lab.targets import TARGETS, target_of
from holdfast_lab.targets.target import TargetError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
DIRECTORY: Final = Path("lab")
BAR: Final = 24


def run(args: argparse.Namespace) -> int:
    """Runs a subcommand."""
    commands = {"list": run_list, "run": run_run, "report": run_report, "compare": run_compare}
    try:
        return commands[args.lab_command](args)
    except (ResultError, TargetError) as error:
        print(f"holdfast: lab: {error}", file=sys.stderr)
        return EXIT_USAGE


def run_list(_: argparse.Namespace) -> int:
    """Prints the experiments and targets."""
    for name, experiment in EXPERIMENTS.items():
        print(f"{name}\n  {experiment.question}\n  from: {experiment.source}")
        print(f"  targets: {', '.join(experiment.targets)}")
    print(
        f"\ntargets: {', '.join(TARGETS)}, or HOST:PORT[,pid=N][,mqtt=3.1.1] of a broker that runs"
    )
    return 0


def run_run(args: argparse.Namespace) -> int:
    """Runs experiments, and stores each result as soon as it is there."""
    chosen = list(EXPERIMENTS) if "all" in args.experiments else args.experiments
    unknown = [name for name in chosen if name not in EXPERIMENTS]
    if unknown:
        known = ", ".join(EXPERIMENTS)
        raise TargetError(f"no experiment {unknown[0]!r}: choose from all, {known}")
    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    is_new = not (directory / store.FILE).exists()
    if not is_new and not args.resume:
        raise ResultError(
            f"{directory} has a run already: continue it with --resume, or give another --directory"
        )
    if is_new:
        made = store.new_run(shlex.join(["holdfast", *args.words]))
        made.machine["fdatasync"] = f"{store.fdatasync_ms(directory):.2f} ms"
    else:
        made = store.load(directory)
        made.command += f"; {shlex.join(['holdfast', *args.words])}"
    plan = [
        (EXPERIMENTS[name], target)
        for name in chosen
        for target in (args.target or EXPERIMENTS[name].chosen(is_quick=args.quick))
        if not made.has(name, target)
    ]
    try:
        _run_plan(plan, made, directory, is_quick=args.quick)
    except KeyboardInterrupt:
        print(f"\ninterrupted; `--resume` continues, {directory} has the results so far")
        return EXIT_INTERRUPTED
    broken = [text for each in made.results for text in each.broken]
    print(f"{len(made.results)} results in {directory / store.FILE};"
          f" `holdfast lab report {directory}` draws them")  # fmt: skip
    measured = any(each.figures for each in made.results)
    return EXIT_FAILED if broken or not measured else 0


def _run_plan(
    plan: list[tuple[Experiment, str]], made: LabRun, directory: Path, *, is_quick: bool
) -> None:
    start_s = time.monotonic()
    for place, (experiment, target) in enumerate(plan):
        line = ProgressLine(f"{experiment.name} · {target}", place, len(plan), start_s)
        result = asyncio.run(_measure(experiment, target, made, directory, line, is_quick))
        made.results.append(result)
        store.save(made, directory)
        line.end(result)


async def _measure(
    experiment: Experiment,
    name: str,
    made: LabRun,
    directory: Path,
    line: "ProgressLine",
    is_quick: bool,
) -> Result:
    """One experiment against one target. What the target does wrong is in the result."""
    stamp = made.started.replace(":", "").replace("-", "")
    label = "".join(sign if sign.isalnum() else "-" for sign in name)
    trial = Trial(f"{experiment.name}-{label}-{stamp}", directory, is_quick, line.show)
    start_s = time.monotonic()
    target = None
    try:
        target = target_of(name, Path(tempfile.mkdtemp(prefix="holdfast-lab-")))
        await asyncio.to_thread(target.start)
        with target.entered():
            result = await experiment.run(target, trial)
    except (TargetError, OSError) as error:
        first, _, _ = str(error).partition("\n")
        result = Result(experiment.name, name, name, "", {}, {}, problems=[first])
    finally:
        if target is not None:
            await asyncio.to_thread(target.stop)
    result.target = name
    result.promise = "" if target is None else target.promise
    result.duration_s = time.monotonic() - start_s
    return result


class ProgressLine:
    """The line on a terminal that shows what is done and how long the rest takes; without a
    terminal, one line for each result."""

    def __init__(self, name: str, place: int, total: int, start_s: float) -> None:
        self._name = name
        self._place = place
        self._total = total
        self._start_s = start_s
        self._shows = sys.stderr.isatty()

    def show(self, share: float, text: str) -> None:
        """Shows the share of this experiment that is done."""
        if not self._shows:
            return
        whole = (self._place + share) / self._total
        filled = round(whole * BAR)
        elapsed_s = time.monotonic() - self._start_s
        left = f"{elapsed_s / whole * (1 - whole):.0f} s left" if whole > 0.02 else ""
        bar = "█" * filled + "░" * (BAR - filled)
        print(f"\r\x1b[K{bar} {self._name}: {text} {left}", end="", file=sys.stderr, flush=True)

    def end(self, result: Result) -> None:
        """Prints the result in a line or two."""
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr)
        main = MAIN.get(result.experiment, ())
        found = [name for name in main if result.figures.get(name) is not None]
        chosen = found or list(result.figures)[: len(main)]
        texts = [f"{name} {figure(result.figures[name])}" for name in chosen]
        print(f"{self._name} ({result.duration_s:.0f} s): {'; '.join(texts) or 'no figures'}")
        for text in result.problems:
            print(f"  no figure: {text}")
        for text in result.broken:
            print(f"  BROKEN PROMISE: {text}")
        sys.stdout.flush()


def run_report(args: argparse.Namespace) -> int:
    """Draws a run as a page, and as Markdown."""
    made = store.load(args.directory)
    if args.document is not None:
        document.keep(made, args.document)
        print(f"{args.document}\n{args.document.with_suffix('') / store.FILE}")
        return 0
    verdicts = {} if args.no_spark else dict(_verdicts(made, args.directory))
    output: Path = args.output or args.directory / "report.html"
    output.write_text(pages.html(made, verdicts))
    output.with_suffix(".md").write_text(document.document(made, str(args.directory)))
    print(f"{output}\n{output.with_suffix('.md')}")
    for name, text in verdicts.items():
        print(f"{name}: {text.splitlines()[0]}")
    if args.png:
        return _draw_png(output)
    return 0


def _verdicts(made: LabRun, directory: Path) -> Iterator[tuple[str, str]]:
    """The verdict of the pipeline on each file of events, without knowledge of the experiment."""
    files = [each.events for each in made.results if each.events]
    if not files:
        return
    from holdfast_lab.judge import verdict
    from holdfast_lab.stored_events import events_of_files
    from holdfast_lake.session import spark_session

    spark = spark_session("holdfast lab")
    try:
        for name in files:
            events = events_of_files(spark, directory / name)
            yield name, verdict(events, name.removesuffix(".jsonl")).text()
    finally:
        spark.stop()


def _draw_png(page: Path) -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("holdfast: lab: --png needs chromium (on Debian: apt install chromium)",
              file=sys.stderr)  # fmt: skip
        return EXIT_FAILED
    picture = page.with_suffix(".png")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--window-size=1200,6000", "--virtual-time-budget=8000", f"--screenshot={picture}",
         page.absolute().as_uri()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or not picture.exists():
        print(f"holdfast: lab: {browser} drew nothing: {done.stderr.strip()[-200:]}",
              file=sys.stderr)  # fmt: skip
        return EXIT_FAILED
    print(picture)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Prints the figures of two runs side by side."""
    rows = pages.comparison(store.load(args.before), store.load(args.after))
    if not rows:
        raise ResultError("the two runs have no figure in common")
    for line in table(rows, []):
        print(line)
    return 0
