"""Compiles the hot modules with mypyc where a C compiler and the Python headers are present.

The source runs unchanged without it, so a failure to compile is never a failure to install. Two
processes with a bound in time compile the modules and load each of them, because mypy can exit, and
a compiler can hang or write libraries that do not load. All compiled modules are installed or none:
they share one library, and a module of another compilation would read it wrongly.

HOLDFAST_COMPILE=0 skips it, HOLDFAST_COMPILE=1 turns a failure into an error.
HOLDFAST_COMPILE_TIMEOUT_S bounds both processes together; slow machines may need more.
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
    "storage/journal/active_index.py",
    "storage/journal/commit_pace.py",
    "storage/reading/cache.py",
    "storage/reading/cursor.py",
    "storage/journal/epoch_table.py",
    "storage/reading/index.py",
    "storage/reading/index_file.py",
    "storage/reading/interest.py",
    "storage/journal/journal.py",
    "storage/partition.py",
    "storage/record.py",
    "storage/batch.py",
    "storage/batch_builder.py",
    "storage/journal/segment.py",
    "storage/journal/segment_list.py",
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
    "broker/session/additions.py",
    "broker/session/audience.py",
    "broker/admission/bans.py",
    "broker/admission/checks.py",
    "broker/admission/client_rights.py",
    "broker/admission/control.py",
    "broker/admission/expulsion.py",
    "broker/admission/proof.py",
    "broker/admission/shares.py",
    "broker/admission/meters.py",
    "broker/admission/throttle.py",
    "broker/admission/token_bucket.py",
    "broker/session/connection.py",
    "broker/session/cursor.py",
    "broker/session/listener_rules.py",
    "broker/session/message.py",
    "broker/session/rarities.py",
    "broker/session/replay.py",
    "broker/session/session.py",
    "broker/session/state.py",
    "broker/session/will.py",
    "broker/delivery/acknowledgements.py",
    "broker/delivery/log_replay.py",
    "broker/connections/accept.py",
    "broker/connections/client_notes.py",
    "broker/connections/close.py",
    "broker/cluster_port.py",
    "broker/config.py",
    "broker/connections/connect.py",
    "broker/connections/exchange.py",
    "broker/connections/keep_alive.py",
    "broker/connections/session_open.py",
    "broker/delivery/delivery.py",
    "broker/delivery/live_lane.py",
    "broker/delivery/replay_pace.py",
    "broker/delivery/transmission.py",
    "broker/durations.py",
    "broker/effects.py",
    "broker/federation_session.py",
    "broker/publish/completion.py",
    "broker/node.py",
    "broker/connections/operations.py",
    "broker/runtime.py",
    "broker/connections/input.py",
    "broker/connections/pending_connects.py",
    "broker/connections/reauthorize.py",
    "broker/publish/producers.py",
    "broker/publish/inbound.py",
    "broker/publish/acceptance.py",
    "broker/publish/aliases.py",
    "broker/publish/delayed_inbound.py",
    "broker/publish/delayed.py",
    "broker/publish/delayed_table.py",
    "broker/publish/delayed_timer.py",
    "broker/queues/changes.py",
    "broker/queues/keeper.py",
    "broker/recovery/inbound_ids.py",
    "broker/recovery/node_recovery.py",
    "broker/recovery/recovery.py",
    "broker/recovery/session_timers.py",
    "broker/recovery/snapshot_entries.py",
    "broker/recovery/state_records.py",
    "broker/recovery/recorded_filters.py",
    "broker/delivery/retained.py",
    "broker/rights.py",
    "broker/routing.py",
    "broker/publish/producer_dedup.py",
    "broker/recorded_state.py",
    "broker/state.py",
    "broker/sweep.py",
    "broker/promise.py",
    "broker/stats.py",
    "broker/delivery/subscriptions.py",
    "broker/delivery/subscribe.py",
    "broker/delivery/unsubscribe.py",
    "broker/delivery/outbox.py",
    "broker/delivery/read_results.py",
    "broker/sys_topics.py",
    "broker/connections/timer_actions.py",
    "broker/connections/wills.py",
    "cluster/publish/admission.py",
    "cluster/publish/uncommitted.py",
    "cluster/publish/leader_sync.py",
    "cluster/publish/apply.py",
    "cluster/reads/read_barrier.py",
    "cluster/shared_groups/coordinator.py",
    "cluster/shared_groups/group_state.py",
    "cluster/sessions/closings.py",
    "cluster/state/open_sessions.py",
    "cluster/sessions/epochs.py",
    "cluster/sessions/unconfirmed.py",
    "cluster/sessions/expiry.py",
    "cluster/context.py",
    "cluster/alone.py",
    "cluster/publish/forwarding.py",
    "cluster/publish/local_commit.py",
    "cluster/publish/pending_records.py",
    "cluster/publish/forward_frames.py",
    "cluster/metadata_proposer.py",
    "cluster/shared_groups/codec.py",
    "cluster/shared_groups/durable_members.py",
    "cluster/shared_groups/groups.py",
    "cluster/sessions/replies.py",
    "cluster/sessions/requests.py",
    "cluster/sessions/coordinator.py",
    "cluster/sessions/reports.py",
    "cluster/sessions/decisions.py",
    "cluster/peer_filters.py",
    "cluster/qos0_routing.py",
    "cluster/leadership_changes.py",
    "cluster/node.py",
    "cluster/part_effects.py",
    "cluster/position_reports.py",
    "cluster/runtime/fitness.py",
    "cluster/runtime/runtime.py",
    "cluster/reads/read_index.py",
    "cluster/broker_port.py",
    "cluster/sessions/acquisition.py",
    "cluster/sessions/owners.py",
    "cluster/sessions/live_sessions.py",
    "cluster/sessions/own_reports.py",
    "cluster/parts.py",
    "cluster/publish/promises.py",
    "cluster/publish/retained_updates.py",
    "cluster/shared_groups/assignments.py",
    "cluster/shared_groups/finish_waits.py",
    "cluster/shared_groups/kept_records.py",
    "cluster/shared_groups/homes.py",
    "cluster/shared_groups/node_agent.py",
    "cluster/shared_groups/group_nodes.py",
    "cluster/shared_groups/progress.py",
    "cluster/shared_groups/record_fetch.py",
    "cluster/shared_groups/reclaim.py",
    "cluster/shared_groups/sent_records.py",
    "cluster/state/client_epochs.py",
    "cluster/state/group_members.py",
    "cluster/state/groups.py",
    "cluster/state/packet_ids.py",
    "cluster/state/replicated.py",
    "cluster/state/offset_ranges.py",
    "cluster/state/transfer.py",
    "cluster/partitions/catch_up.py",
    "cluster/failure/detector.py",
    "cluster/failure/disk_watch.py",
    "cluster/failure/cluster_clock.py",
    "cluster/runtime/probes.py",
    "cluster/sessions/ownership_lease.py",
    "cluster/sessions/releases.py",
    "cluster/partitions/follower.py",
    "cluster/failure/heartbeat.py",
    "cluster/partitions/in_sync.py",
    "cluster/partitions/leader.py",
    "cluster/partitions/log_matching.py",
    "cluster/partitions/progress.py",
    "cluster/partitions/effects.py",
    "cluster/partitions/log.py",
    "cluster/partitions/state.py",
    "cluster/partitions/codec.py",
    "cluster/partitions/replication.py",
    "server/event_loop/broker.py",
    "server/event_loop/cluster_broker.py",
    "server/event_loop/log_reads.py",
    "server/event_loop/note_ring.py",
    "server/event_loop/replay_turns.py",
    "server/disk/journal_writer.py",
    "server/sockets/loopback_transport.py",
    "server/peers/frames.py",
    "server/peers/link.py",
    "server/peers/links.py",
    "server/peers/mesh.py",
    "protocol/relay/credit.py",
    "protocol/relay/frames.py",
    "server/io_workers/channel.py",
    "server/io_workers/relays.py",
    "server/io_workers/stream.py",
    "server/sockets/driver.py",
    "server/sockets/tcp.py",
    "server/sockets/tls_stream.py",
    "server/sockets/transport.py",
    "federation/sidecar/links.py",
    "protocol/websocket/frames.py",
    "protocol/websocket/stream.py",
    "server/sockets/websocket.py",
    "client/transport/websocket.py",
    "cli/log_rate.py",
]


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
            ["--config-file=tools/mypyc.ini", *(f"src/holdfast/{name}" for name in HOT)],
            opt_level="2",
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
        names = [f"holdfast.{name.removesuffix('.py').replace('/', '.')}" for name in HOT]
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
