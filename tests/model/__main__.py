"""`python -m tests.model`: simulated runs of single parts, with seeds that nobody has seen yet.

`--seed N` runs that one, and prints its error and events if it goes wrong. Without it the first
seed of each model is drawn from the system's randomness and printed. Runs use all cores; one that
goes wrong does not stop the others. The last lines are rows for `tests/sim-record.md`.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tests.model.models import MODELS
from tests.model.running import begin, run_seed

FRESH_SEEDS = 100
"""Without `--seed` and `--seeds`."""
SHOWN = 2000
"""Characters of an error that are printed when there are several seeds."""
ROOT = Path(__file__).parents[2]
IS_COMPILED: Final = "HOLDFAST_INTERPRETED" not in os.environ and any(
    each.name.endswith(tuple(EXTENSION_SUFFIXES))
    for each in (ROOT / "src" / "holdfast" / "node").iterdir()
)
"""The compiled modules are there, and were not turned off for this command."""


@dataclass
class Campaign:
    """The runs of one model, and what came of them. `error` is why the campaign ended early."""

    model: str
    first: int
    count: int
    well: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def is_well(self) -> bool:
        return not self.wrong and not self.error

    def row(self, commit: str) -> str:
        form = "" if MODELS[self.model].is_interpreted or not IS_COMPILED else ", compiled"
        done = self.well + len(self.wrong)
        return (
            f"| {self.model} | `{commit}` | {done:,} from {self.first}{form}"
            f" | {self.well:,} | {len(self.wrong)} | {self.seconds:,.0f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model")
    parser.add_argument("--models", default="", help=f"of {','.join(MODELS)}; default: all")
    parser.add_argument("--seed", type=int, help="default: drawn for each model, and printed")
    parser.add_argument("--seeds", type=int, help="so many, from --seed on; default: 1, or 100")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit for each model")
    options = parser.parse_args()
    commit = _commit()
    models = options.models.split(",") if options.models else list(MODELS)
    if unknown := [model for model in models if model not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    count = options.seeds or (FRESH_SEEDS if options.seed is None else 1)
    campaigns = []
    for model in models:
        first = secrets.randbelow(1 << 32) if options.seed is None else options.seed
        campaign = Campaign(model, first, count)
        campaigns.append(campaign)
        try:
            run_campaign(campaign, options.jobs, options.seconds)
        except KeyboardInterrupt:
            break
    _summarize(campaigns, commit)
    return 0 if all(each.is_well for each in campaigns) else 1


def run_campaign(campaign: Campaign, jobs: int, limit_s: float) -> None:
    """Starts no run after `limit_s`."""
    model, first, count = campaign.model, campaign.first, campaign.count
    print(f"{model}: seeds {first} to {first + count - 1}, {jobs} at a time", flush=True)
    started = time.monotonic()
    seeds = iter(range(first, first + count))
    # Each process begins anew: a run is to depend on its seed alone.
    form = (MODELS[model].is_interpreted,)
    pool = ProcessPoolExecutor(min(jobs, count), get_context("spawn"), begin, form)
    try:
        running: dict[Future[str], int] = {}
        while True:
            if time.monotonic() - started < limit_s:
                for seed in islice(seeds, 2 * jobs - len(running)):
                    running[pool.submit(run_seed, MODELS[model], seed)] = seed
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                _enter(campaign, running[future], future.result())
                del running[future]
    except BrokenProcessPool:
        campaign.error = f"a process ended in one of the seeds {sorted(running.values())}"
    except KeyboardInterrupt:
        campaign.error = "interrupted"
        raise
    finally:
        campaign.seconds = time.monotonic() - started
        pool.shutdown(cancel_futures=True)


def _enter(campaign: Campaign, seed: int, wrong: str) -> None:
    if wrong:
        campaign.wrong[seed] = wrong.partition("\n")[0][:200]
        shown = wrong if campaign.count == 1 else wrong[:SHOWN]
        print(f"{campaign.model}: seed {seed}: {shown}", flush=True)
    else:
        campaign.well += 1


def _summarize(campaigns: list[Campaign], commit: str) -> None:
    for campaign in campaigns:
        if campaign.error:
            print(f"{campaign.model}: {campaign.error}")
        for seed, wrong in sorted(campaign.wrong.items()):
            print(f"python -m tests.model --models {campaign.model} --seed {seed}    {wrong}")
    print("| model | commit | seeds | well | wrong | seconds |")
    print("|---|---|---|---|---|---|")
    for campaign in campaigns:
        print(campaign.row(commit), flush=True)


def _lines(*command: str) -> Iterator[str]:
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    yield from found.stdout.splitlines()


def _commit() -> str:
    commit = next(_lines("git", "rev-parse", "--short=7", "HEAD"), "unknown")
    is_changed = any(_lines("git", "status", "--porcelain", "--untracked-files=no"))
    return f"{commit} with local changes" if is_changed else commit


if __name__ == "__main__":
    sys.exit(main())
