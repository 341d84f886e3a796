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
from setuptools._distutils.ccompiler import CCompiler

HOT = [
    "log/active_index.py",
    "log/cache.py",
    "log/cursor.py",
    "log/epoch_table.py",
    "log/index.py",
    "log/index_file.py",
    "log/interest.py",
    "log/journal.py",
    "log/partition.py",
    "log/record.py",
    "log/segment.py",
    "log/segment_list.py",
    "mqtt/decode.py",
    "mqtt/encode.py",
    "mqtt/errors.py",
    "mqtt/fields.py",
    "mqtt/framing.py",
    "mqtt/packets.py",
    "mqtt/properties.py",
    "mqtt/publish.py",
    "mqtt/reasons.py",
    "topics/names.py",
    "topics/retained.py",
    "topics/trie.py",
    "session/audience.py",
    "session/connection.py",
    "session/cursor.py",
    "session/message.py",
    "session/session.py",
    "session/state.py",
    "node/acknowledging.py",
    "node/catching_up.py",
    "node/closing.py",
    "node/config.py",
    "node/connecting.py",
    "node/delivery.py",
    "node/effects.py",
    "node/federating.py",
    "node/held_publish.py",
    "node/node.py",
    "node/pending_connects.py",
    "node/producers.py",
    "node/publishing.py",
    "node/recording.py",
    "node/retained.py",
    "node/rights.py",
    "node/routing.py",
    "node/sequencing.py",
    "node/state.py",
    "node/stats.py",
    "node/subscribing.py",
    "node/sys_topics.py",
    "node/wills.py",
    "cluster/admission.py",
    "cluster/alignment.py",
    "cluster/applying.py",
    "cluster/barriers.py",
    "cluster/coordinating.py",
    "cluster/coordination.py",
    "cluster/endings.py",
    "cluster/fabric.py",
    "cluster/forwarding.py",
    "cluster/governing.py",
    "cluster/group_wire.py",
    "cluster/groups.py",
    "cluster/home_answers.py",
    "cluster/home_requests.py",
    "cluster/homes.py",
    "cluster/interest.py",
    "cluster/leadership.py",
    "cluster/member.py",
    "cluster/metadata_reads.py",
    "cluster/node_side.py",
    "cluster/opening.py",
    "cluster/owners.py",
    "cluster/parts.py",
    "cluster/promises.py",
    "cluster/retained_updates.py",
    "cluster/shares.py",
    "cluster/taken_back.py",
    "cluster/transfer.py",
    "replication/catch_up.py",
    "replication/detector.py",
    "replication/following.py",
    "replication/heartbeat.py",
    "replication/in_sync.py",
    "replication/leading.py",
    "replication/log_matching.py",
    "replication/progress.py",
    "replication/replica_effects.py",
    "replication/replica_log.py",
    "replication/replica_state.py",
    "replication/replica_wire.py",
    "replication/replication.py",
    "drivers/broker.py",
    "drivers/cluster_broker.py",
    "drivers/disk.py",
    "drivers/in_process.py",
    "drivers/peer_frames.py",
    "drivers/peer_link.py",
    "drivers/peers.py",
    "drivers/tcp.py",
    "drivers/transport.py",
    "websocket/frames.py",
]


def compile_side_by_side(
    self: CCompiler,
    sources: list,
    output_dir: str | None = None,
    macros: list | None = None,
    include_dirs: list | None = None,
    debug: bool = False,
    extra_preargs: list | None = None,
    extra_postargs: list | None = None,
    depends: list | None = None,
) -> list:
    """In place of CCompiler.compile, which compiles one file after the other."""
    macros, objects, extra_postargs, flags, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs
    )
    arguments = self._get_cc_args(flags, debug, extra_preargs)

    def compile_one(name: str) -> None:
        source, extension = build[name]
        self._compile(name, source, extension, arguments, extra_postargs, flags)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, [name for name in objects if name in build]))
    return objects


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


setup(ext_modules=compiled_modules())
