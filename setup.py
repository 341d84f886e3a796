"""Compiles the hot modules with mypyc where a C compiler and the Python headers are present.

The source runs unchanged without it, so a failure to compile is never a failure to install. Two
processes with a bound in time compile the modules and load each of them, because mypy can exit, and
a compiler can hang or write libraries that do not load. All compiled modules are installed or none:
they share one library, and a module of another compilation would read it wrongly.

HOLDFAST_COMPILE=0 skips it, HOLDFAST_COMPILE=1 turns a failure into an error.
HOLDFAST_COMPILE_TIMEOUT_S bounds both processes together; slow machines may need more.
HOLDFAST_COMPILE_LEVEL is the compiler's level of optimization, 2 by default.
"""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WANTED = os.environ.get("HOLDFAST_COMPILE", "auto")
TIMEOUT_S = float(os.environ.get("HOLDFAST_COMPILE_TIMEOUT_S", "1800"))
LEVEL = os.environ.get("HOLDFAST_COMPILE_LEVEL", "2")
COMPILES_INTO = "HOLDFAST_COMPILES_INTO"
"""Set in the process that compiles: the directory for the generated C."""
SHOWN_LINES = 30
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
# msgspec's types: without them mypy rejects each Struct. Other packages count as untyped.
COMPILER_REQUIRES = ["mypy>=1.18", "msgspec>=0.19"]
TYPES_REJECTED = 3
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# What a module needs only at run time is not installed here.
LOAD_EACH = """
import importlib, sys
for name in sys.argv[2:]:
    try:
        file = importlib.import_module(name).__file__
        assert file.startswith(sys.argv[1]) and file.endswith(".so"), file
    except ModuleNotFoundError as error:
        if error.name.startswith("holdfast"):
            raise
"""

HOT = [
    "log/journal/active_index.py",
    "log/journal/group_commit_delay.py",
    "log/reading/cache.py",
    "log/reading/cursor.py",
    "log/journal/epoch_table.py",
    "log/reading/index.py",
    "log/reading/index_file.py",
    "log/reading/interest.py",
    "log/journal/journal.py",
    "log/partition.py",
    "log/record.py",
    "log/batch.py",
    "log/batch_builder.py",
    "log/journal/segment.py",
    "log/journal/segment_list.py",
    "protocol/mqtt/decode.py",
    "protocol/mqtt/encode.py",
    "protocol/mqtt/errors.py",
    "protocol/mqtt/fields.py",
    "protocol/mqtt/framing.py",
    "protocol/mqtt/packets.py",
    "protocol/mqtt/properties.py",
    "protocol/mqtt/publish.py",
    "protocol/mqtt/reasons.py",
    "protocol/topics/names.py",
    "protocol/topics/retained.py",
    "protocol/topics/trie.py",
    "node/session/additions.py",
    "node/session/audience.py",
    "node/admission/bans.py",
    "node/admission/checks.py",
    "node/admission/client_rights.py",
    "node/admission/control.py",
    "node/admission/ban_enforcement.py",
    "node/admission/shares.py",
    "node/admission/meters.py",
    "node/admission/throttle.py",
    "node/admission/token_bucket.py",
    "node/session/connection.py",
    "node/session/cursor.py",
    "node/session/listener_rules.py",
    "node/session/message.py",
    "node/session/rare_fields.py",
    "node/session/session.py",
    "node/session/state.py",
    "node/delivery/acknowledgements.py",
    "node/delivery/log_replay.py",
    "node/node.py",
    "node/connections/accepted_connect.py",
    "node/connections/client_notes.py",
    "node/connections/close.py",
    "node/config.py",
    "node/connections/connect.py",
    "node/connections/exchange.py",
    "node/connections/keep_alive.py",
    "node/connections/session_open.py",
    "node/delivery/delivery.py",
    "node/delivery/live_lane.py",
    "node/delivery/replay_pace.py",
    "node/delivery/transmission.py",
    "node/durations.py",
    "node/effects.py",
    "node/federation_session.py",
    "node/publish/completion.py",
    "node/connections/operations.py",
    "node/connections/pending_connects.py",
    "node/connections/reauthorize.py",
    "node/publish/producers.py",
    "node/publish/inbound.py",
    "node/publish/acceptance.py",
    "node/publish/delayed.py",
    "node/publish/delayed_table.py",
    "node/groups/queue_changes.py",
    "node/groups/queue_keeper.py",
    "node/state/inbound_ids.py",
    "node/ownership/live_sessions.py",
    "node/state/recovery.py",
    "node/state/snapshot_entries.py",
    "node/state/state_records.py",
    "node/state/replicated.py",
    "node/delivery/retained.py",
    "node/refusal.py",
    "node/rights.py",
    "node/routing/routing.py",
    "node/publish/producer_dedup.py",
    "node/state/recorded_state.py",
    "node/state/retained_store.py",
    "node/node_state.py",
    "node/sweep.py",
    "node/stats.py",
    "node/delivery/subscriptions.py",
    "node/delivery/subscribe.py",
    "node/delivery/unsubscribe.py",
    "node/delivery/outbox.py",
    "node/delivery/read_results.py",
    "node/sys_topics.py",
    "node/ownership/wills_and_expiry.py",
    "node/publish/admission.py",
    "node/publish/leader_sync.py",
    "node/publish/apply.py",
    "node/reads/read_barrier.py",
    "node/groups/coordinator.py",
    "node/groups/group_state.py",
    "node/ownership/closings.py",
    "node/ownership/owners.py",
    "node/ownership/reports.py",
    "node/context.py",
    "node/alone.py",
    "node/publish/forwarding.py",
    "node/publish/local_commit.py",
    "node/publish/pending_records.py",
    "node/publish/forward_frames.py",
    "node/metadata_proposer.py",
    "node/groups/codec.py",
    "node/groups/durable_members.py",
    "node/groups/groups.py",
    "node/ownership/replies.py",
    "node/ownership/requests.py",
    "node/ownership/coordinator.py",
    "node/ownership/decisions.py",
    "node/routing/peer_filters.py",
    "node/routing/qos0_frames.py",
    "node/routing/qos0_routing.py",
    "node/leadership_changes.py",
    "node/cluster_node.py",
    "node/part_effects.py",
    "node/position_reports.py",
    "node/runtime/fitness.py",
    "node/runtime/node_links.py",
    "node/runtime/probes.py",
    "node/runtime/runtime.py",
    "node/reads/read_index.py",
    "node/ownership/acquisition.py",
    "node/ownership/own_reports.py",
    "node/parts.py",
    "node/publish/promises.py",
    "node/publish/retained_updates.py",
    "node/groups/assignments.py",
    "node/groups/node_agent.py",
    "node/groups/homes.py",
    "node/groups/next_node.py",
    "node/groups/progress.py",
    "node/groups/sent_records.py",
    "node/state/client_epochs.py",
    "node/state/groups.py",
    "node/state/packet_ids.py",
    "node/state/offset_ranges.py",
    "node/state/transfer.py",
    "node/feeds/feeds.py",
    "node/feeds/filter_holds.py",
    "node/feeds/frames.py",
    "node/feeds/receiver.py",
    "node/feeds/server.py",
    "node/feeds/stored_partitions.py",
    "node/reads/fetch_server.py",
    "node/reads/read_jobs.py",
    "node/reads/remote_reads.py",
    "node/replicate/catch_up.py",
    "node/replicate/commit_frames.py",
    "node/failure/detector.py",
    "node/failure/disk_watch.py",
    "node/failure/cluster_clock.py",
    "node/ownership/lease.py",
    "node/ownership/releases.py",
    "node/replicate/follower.py",
    "node/replicate/in_sync.py",
    "node/replicate/leader.py",
    "node/replicate/log_matching.py",
    "node/replicate/progress.py",
    "node/replicate/effects.py",
    "node/replicate/log.py",
    "node/replicate/state.py",
    "node/replicate/codec.py",
    "node/replicate/replication.py",
    "io/event_loop/broker.py",
    "io/event_loop/log_reads.py",
    "io/event_loop/note_ring.py",
    "io/disk/journal_writer.py",
    "io/sockets/loopback_transport.py",
    "io/peers/link.py",
    "io/peers/links.py",
    "io/peers/mesh.py",
    "io/sockets/driver.py",
    "io/sockets/tcp.py",
    "io/sockets/tls_stream.py",
    "io/sockets/transport.py",
    "holdfast_federation/sidecar/links.py",
    "protocol/websocket/frames.py",
    "protocol/websocket/stream.py",
    "io/sockets/websocket.py",
    "client/transport/websocket.py",
    "cli/log_rate.py",
]
PATHS = [name if name.startswith("holdfast_") else f"holdfast/{name}" for name in HOT]


class BuildSideBySide(build_ext):
    """Compiles on all cores: distutils compiles the files of one module one after the other."""

    def build_extensions(self) -> None:
        compiler = self.compiler
        compile_in_turn = compiler.compile

        def compile_side_by_side(sources: list, *args: object, **kwargs: object) -> list:
            def compile_one(source: str) -> list:
                return compile_in_turn([source], *args, **kwargs)

            # The largest first, so that no core waits for one of them at the end.
            by_size = sorted(sources, key=os.path.getsize, reverse=True)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [each for objects in pool.map(compile_one, by_size) for each in objects]

        compiler.compile = compile_side_by_side
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()


def extensions_from_mypyc(directory: str) -> list:
    from mypyc.build import mypycify

    try:
        modules = mypycify(
            ["--config-file=tools/mypyc.ini", *(f"src/{path}" for path in PATHS)],
            opt_level=LEVEL,
            debug_level="0",
            multi_file=True,
            group_name="holdfast",
            target_dir=directory,
        )
    except SystemExit:
        sys.exit(TYPES_REJECTED)
    for module in modules:
        # mypyc makes errors of warnings, and each compiler warns of something else.
        module.extra_compile_args.append("-Wno-error")
    return modules


class CannotCompile(Exception):
    """Why the hot modules stay interpreted."""


def what_is_missing() -> str | None:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(compiler) is None:
        return f"{compiler} is missing"
    return None if headers.exists() else f"{headers} is missing"


def run(command: list, log: Path, deadline: float, **environment: str) -> int:
    """Run a command and return its exit code; at the deadline, end it and all that it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotCompile(f"compiling took longer than {TIMEOUT_S:g} s") from None
            raise


def compile_hot(directory: Path) -> Path:
    """Compile all hot modules below `directory`; return the root of the complete package."""
    missing = what_is_missing()
    if missing is None and find_spec("mypyc") is None:
        missing = "mypy is missing"
    if missing is not None:
        raise CannotCompile(missing)
    built, log = directory / "lib", directory / "log"
    deadline = time.monotonic() + TIMEOUT_S
    build = ["setup.py", "-q", "build", f"--build-base={directory}", f"--build-lib={built}"]
    try:
        code = run(build, log, deadline, MYPYPATH="src", **{COMPILES_INTO: str(directory / "c")})
        if code:
            why = "mypy rejects their types" if code == TYPES_REJECTED else "compiling them failed"
            raise CannotCompile(f"{why} (exit code {code})")
        path = os.pathsep.join([str(built), os.environ.get("PYTHONPATH", "")])
        names = [path.removesuffix(".py").replace("/", ".") for path in PATHS]
        load = ["-c", LOAD_EACH, str(built), *names]
        if run(load, log, deadline, PYTHONPATH=path, HOLDFAST_INTERPRETED=""):
            raise CannotCompile("the compiled modules do not load")
    except CannotCompile:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        raise
    return built


class CopyCompiled(build_ext):
    """Copies the compiled modules to where setuptools wants them: all of them, or none."""

    def build_extensions(self) -> None:
        for old in Path(self.build_lib).rglob("*.so"):
            old.unlink()
        done = []
        try:
            for each in self.extensions:
                done.append(Path(self.get_ext_fullpath(each.name)))
                done[-1].parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(each.sources[0], done[-1])
        except OSError as error:
            for each in done:
                each.unlink(missing_ok=True)
            self.extensions.clear()
            stay_interpreted(error)


def stay_interpreted(why: Exception) -> None:
    if WANTED == "1":
        raise SystemExit(f"HOLDFAST_COMPILE=1, but {why}")
    print(f"holdfast: the hot modules stay interpreted: {why}", file=sys.stderr)


def compiled_modules() -> list:
    """Return the compiled modules as extensions whose source is the finished library; or none."""
    if WANTED == "0" or not BUILDS.intersection(sys.argv):
        return []
    if "editable_wheel" in sys.argv or "--inplace" in sys.argv:
        # Python prefers them to the source, which may be newer.
        for old in Path("src").rglob(f"*{SUFFIX}"):
            old.unlink()
    try:
        Path("build").mkdir(exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="compile-", dir="build")).absolute()
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        built = compile_hot(directory)
    except (CannotCompile, OSError) as error:
        stay_interpreted(error)
        return []
    files = sorted(built.rglob(f"*{SUFFIX}"))
    modules = [str(each.relative_to(built)).removesuffix(SUFFIX) for each in files]
    return [
        Extension(module.replace("/", "."), [str(file)])
        for module, file in zip(modules, files, strict=True)
    ]


if COMPILES_INTO in os.environ:
    setup(
        ext_modules=extensions_from_mypyc(os.environ[COMPILES_INTO]),
        cmdclass={"build_ext": BuildSideBySide},
    )
else:
    can_compile = WANTED != "0" and what_is_missing() is None
    setup(
        ext_modules=compiled_modules(),
        # In an isolated environment only what compiles has to be there.
        setup_requires=COMPILER_REQUIRES if can_compile and "egg_info" in sys.argv else [],
        cmdclass={"build_ext": CopyCompiled},
    )
