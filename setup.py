"""Compiles the hot modules with mypyc where a C compiler and the Python headers are present.

The source runs unchanged without it, so a failure to compile is never a failure to install.
HOLDFAST_COMPILE=0 skips it, HOLDFAST_COMPILE=1 turns a failure into an error.
"""

import os
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

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
    "broker/recovery/state_records.py",
    "broker/delivery/retained.py",
    "broker/rights.py",
    "broker/routing.py",
    "broker/publish/producer_dedup.py",
    "broker/recorded_state.py",
    "broker/state.py",
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
    "cluster/publish/leader_sync.py",
    "cluster/publish/apply.py",
    "cluster/reads/read_barrier.py",
    "cluster/shared_groups/coordinator.py",
    "cluster/shared_groups/group_state.py",
    "cluster/sessions/epochs.py",
    "cluster/sessions/unconfirmed.py",
    "cluster/sessions/expiry.py",
    "cluster/context.py",
    "cluster/publish/forwarding.py",
    "cluster/publish/pending_records.py",
    "cluster/publish/forward_frames.py",
    "cluster/metadata_proposer.py",
    "cluster/shared_groups/codec.py",
    "cluster/shared_groups/groups.py",
    "cluster/sessions/replies.py",
    "cluster/sessions/requests.py",
    "cluster/sessions/coordinator.py",
    "cluster/sessions/reports.py",
    "cluster/sessions/decisions.py",
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


def compiled_modules() -> list:
    wanted = os.environ.get("HOLDFAST_COMPILE", "auto")
    if wanted == "0":
        return []
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(compiler) is None or not headers.exists():
        if wanted == "1":
            raise SystemExit(f"HOLDFAST_COMPILE=1, but {compiler} or {headers} is missing")
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        if wanted == "1":
            raise
        return []
    os.environ["MYPYPATH"] = "src"
    modules = mypycify(
        [
            "--config-file=tools/mypyc.ini",
            *(f"src/holdfast/{name}" for name in HOT),
        ],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        group_name="holdfast",
    )
    if wanted != "1":
        for module in modules:
            module.optional = True
    return modules


setup(ext_modules=compiled_modules(), cmdclass={"build_ext": BuildSideBySide})
