"""A Ceph cluster of one disk with its S3 gateway, for the tests marked `long`.

    apt-get install --no-install-recommends ceph-mon ceph-osd radosgw

All processes are children of the test, on ports of their own, with their data in its folder.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen
from uuid import uuid4

from tests.support.ports import free_port

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
BUCKET = "lake"
KEY = "lakekey"
SECRET = "lakesecret"
COMMAND_S = 120.0
START_S = 300.0
STOP_S = 30.0
OSD_PORTS = 32
"""The OSD takes eight ports of these."""

CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0,v1:127.0.0.1:{mon_v1_port}/0]
auth allow insecure global id reclaim = true
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block size = 4294967296
osd memory target = 939524096
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
pid file = {folder}/$name.pid
ms bind port min = {osd_port}
ms bind port max = {osd_port_max}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon data avail crit = 1
mon data avail warn = 2
[client.admin]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 32
rgw dns name = localhost
"""


def missing_programs() -> list[str]:
    """The programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class RadosGateway:
    """The processes, and the gateway that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        folder, fsid = self.folder, str(uuid4())
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir(parents=True)
        mon_port, v1_port, osd_port = free_port(), free_port(), free_port()
        configuration = CONFIGURATION.format(
            fsid=fsid, folder=folder, port=self.port, mon_port=mon_port, mon_v1_port=v1_port,
            osd_port=osd_port, osd_port_max=osd_port + OSD_PORTS,
        )  # fmt: skip
        (folder / "ceph.conf").write_text(configuration)
        keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
        mon, all_ = ("--cap", "mon", "allow *"), ("--cap", "osd", "allow *")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *mon)
        admin = ("--gen-key", "-n", "client.admin", *mon, *all_, "--cap", "mgr", "allow *")
        self._run("ceph-authtool", keyring, *admin)
        addresses = f"[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{v1_port}]"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._start("ceph-mon", "-i", "a")
        own = ("--cap", "mon", "allow profile osd", *all_)
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "osd.0", *own)
        osd = str(uuid4())
        self._run("ceph", "osd", "new", osd)
        self._run("ceph", "auth", "import", "-i", keyring)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0")
        user = ("user", "create", "--uid=lake", "--display-name=lake")
        self._run("radosgw-admin", *user, f"--access-key={KEY}", f"--secret={SECRET}")
        self.start_gateway()
        self._make_bucket()

    def _make_bucket(self) -> None:
        """Obstore makes no buckets. To S3 it is a PUT of the empty key."""
        import obstore

        store = obstore.store.S3Store(
            BUCKET, endpoint=self.endpoint, access_key_id=KEY, secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip
        url = obstore.sign(store, "PUT", "", timedelta(minutes=5))
        with urlopen(Request(url, method="PUT"), timeout=COMMAND_S) as response:
            assert response.status == 200

    def start_gateway(self) -> None:
        """Returns when it serves."""
        self._start("radosgw", "-n", "client.admin")
        self._wait(self._serves, "radosgw")

    def kill9_gateway(self) -> None:
        process = self._processes.pop("radosgw")
        process.kill()
        process.wait(STOP_S)

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in reversed(self._processes.values()):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _serves(self) -> bool:
        try:
            with urlopen(self.endpoint, timeout=5) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.folder / "ceph.conf")}

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, timeout=COMMAND_S
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"

    def _start(self, program: str, *words: str) -> None:
        """In the foreground, so that it is a child of the test."""
        with (self.folder / f"{program}.out").open("ab") as output:
            self._processes[program] = subprocess.Popen(
                [program, *words, "-f"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _wait(self, condition: Callable[[], bool], program: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            output = (self.folder / f"{program}.out").read_text(errors="replace")[-2000:]
            assert self._processes[program].poll() is None, output
            assert time.monotonic() < deadline, output
            time.sleep(0.1)


@contextmanager
def rados_gateway(folder: Path) -> Iterator[RadosGateway]:
    """With an empty bucket."""
    gateway = RadosGateway(folder)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
