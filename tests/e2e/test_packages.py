"""The packages in dist/, each installed on a bare Debian root: `make test-packages`.

A root has Debian's essential packages and no Python. It shares the network of this machine, so the
brokers listen on free ports. Needs root, and the programs that `make test-packages` installs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
BASE = ROOT / "build" / "bookworm.tar"
IMAGE_BYTES_MAX = 120_000_000
TIMEOUT_S = 900
START_TIMEOUT_S = 60

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(TIMEOUT_S),
    pytest.mark.skipif("HOLDFAST_PACKAGES" not in os.environ, reason="make test-packages"),
]


def run(*command: str | Path, timeout_s: float = TIMEOUT_S) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def package(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"{pattern} in dist/: {found}; run make wheel deb image"
    return found[0]


class BareRoot:
    """A Debian of its own, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.copy("/etc/resolv.conf", directory / "etc" / "resolv.conf")
        # Debian's installer and each container runtime write it.
        (directory / "etc" / "hosts").write_text("127.0.0.1 localhost\n")

    def run(self, command: str, *, user: str = "root", timeout_s: float = TIMEOUT_S) -> str:
        return run(*self.command(command, user), timeout_s=timeout_s)

    def command(self, command: str, user: str = "root") -> list[str]:
        # /proc is mounted in a namespace of the command, and so is gone with it.
        script = (
            f"mount -t proc proc {self.directory}/proc"
            f" && exec chroot --userspec={user}: {self.directory}"
            f" env -i DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/tmp"
            " PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            ' sh -ec "$0"'
        )
        return ["unshare", "--mount", "sh", "-ec", script, command]


@pytest.fixture
def bare(tmp_path: Path) -> BareRoot:
    return bare_root(tmp_path)


def bare_root(parent: Path) -> BareRoot:
    if not BASE.exists():
        BASE.parent.mkdir(exist_ok=True)
        part = BASE.with_suffix(".part.tar")
        run("mmdebstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", part)
        part.rename(BASE)
    directory = parent / "root"
    directory.mkdir()
    run("tar", "-xf", BASE, "-C", directory)
    return BareRoot(directory)


@contextlib.contextmanager
def serving(command: list[str], port: int) -> Iterator[float]:
    """A broker, and the seconds until a client had its first message acknowledged."""
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        publish = [sys.executable, "-m", "holdfast.cli.main", "pub", "-p", str(port), "-q", "1"]
        while time.monotonic() - began < START_TIMEOUT_S:
            assert process.poll() is None, process.communicate()[1]
            if not subprocess.run(
                [*publish, "-t", "x", "-m", "first"], capture_output=True
            ).returncode:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the broker did not acknowledge a message")
        yield time.monotonic() - began
    finally:
        process.terminate()
        _, log = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, log[-3000:]


def five_minutes(root: BareRoot, port: int, user: str = "root") -> None:
    """The README's commands: subscribe, publish, read the past."""
    root.run(
        f"holdfast sub -p {port} -t 'greetings/#' -q 1 -C 1 -v >/tmp/seen & reader=$!;"
        # The subscriber may connect after the first message.
        " until [ -s /tmp/seen ]; do"
        f" holdfast pub -p {port} -t greetings/world -q 1 -m hello; sleep 0.1; done; wait $reader;"
        " grep -qx 'greetings/world hello' /tmp/seen;"
        f" holdfast sub -p {port} -t 'greetings/#' -q 1 --last 1 --until now | grep -qx hello",
        user=user,
        timeout_s=120,
    )


@pytest.mark.parametrize("form", ["compiled", "interpreted"])
def test_a_wheel(bare: BareRoot, form: str) -> None:
    """`pip install` without a compiler and without the network."""
    wheel = package(
        "holdfast-*-manylinux*.whl" if form == "compiled" else "holdfast-*-none-any.whl"
    )
    bare.run("apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv")
    wheels = bare.directory / "wheels"
    run(
        sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", wheels, wheel
    )
    bare.run("if command -v cc; then exit 1; fi; python3 -m venv /opt/holdfast")
    began = time.monotonic()
    bare.run("/opt/holdfast/bin/pip install -q --no-index --find-links /wheels holdfast")
    installed_s = time.monotonic() - began
    bare.run("ln -s /opt/holdfast/bin/holdfast /usr/local/bin/")
    assert f"({form}, CPython 3.11" in bare.run("holdfast --version")
    port = free_port()
    command = bare.command(f"exec holdfast serve -p {port} --admin off --data /tmp/data")
    with serving(command, port) as first_s:
        five_minutes(bare, port)
    print(f"\n{form} wheel: pip install {installed_s:.1f} s, first message {first_s:.2f} s")


def test_the_debian_package(bare: BareRoot) -> None:
    deb = package("holdfast_*.deb")
    shutil.copy(deb, bare.directory / "holdfast.deb")
    bare.run("apt-get update -q")
    began = time.monotonic()
    bare.run("apt-get install -y -q --no-install-recommends /holdfast.deb")
    installed_s = time.monotonic() - began
    owner = (bare.directory / "var/lib/holdfast").stat()
    names = bare.run("getent passwd holdfast").split(":")
    assert int(names[2]) == owner.st_uid != 0
    assert owner.st_mode & 0o777 == 0o700
    port, admin = free_port(), free_port()
    settings = "/etc/holdfast/holdfast.toml"
    bare.run(f"holdfast serve -c {settings} --check-config", user="holdfast")
    serve = f"exec holdfast serve -c {settings} -p {port} --admin 127.0.0.1:{admin}"
    with serving(bare.command(serve, "holdfast"), port) as first_s:
        five_minutes(bare, port, "holdfast")
    assert (bare.directory / "var/lib/holdfast/manifest.json").is_file()
    # A conffile that was edited stays at an upgrade; the data too.
    bare.run(f"echo '# mine' >>{settings}; dpkg -i --force-confold /holdfast.deb")
    assert "# mine" in (bare.directory / settings[1:]).read_text()
    bare.run("dpkg -r holdfast")
    assert (bare.directory / settings[1:]).is_file()
    assert (bare.directory / "var/lib/holdfast/manifest.json").is_file()
    assert not (bare.directory / "usr/lib/holdfast").exists()
    bare.run("dpkg -P holdfast")
    assert not (bare.directory / "var/lib/holdfast").exists()
    assert not (bare.directory / "etc/holdfast").exists()
    print(f"\ndeb: apt install {installed_s:.1f} s, first message {first_s:.2f} s")


@pytest.mark.parametrize(
    ("settings", "default", "expected"),
    [
        ("", "auto", "restart"),
        ("standby = true", "auto", "one of several nodes"),
        ('[cluster]\npeer_bind = "127.0.0.1"', "auto", "one of several nodes"),
        ('[cluster]\npeer_bind = "127.0.0.1"', "yes", "restart"),
        ("", "no", "RESTART_ON_UPGRADE is no"),
        ("no_such = 1", "yes", "this version refuses /etc/holdfast/holdfast.toml"),
    ],
)
def test_an_upgrade_restarts_what_may_stop_alone(
    upgraded: BareRoot, settings: str, default: str, expected: str
) -> None:
    """With programs in place of systemd's that write down how they are called."""
    file = upgraded.directory / "etc/holdfast/holdfast.toml"
    file.write_text(f'[node]\ndata = "/var/lib/holdfast"\nid = "n1"\n{settings}\n')
    upgraded.run("rm -f /calls")
    upgraded.run(f"echo RESTART_ON_UPGRADE={default} >/etc/default/holdfast")
    shown = upgraded.run("dpkg -i --force-confold /holdfast.deb 2>&1")
    calls = upgraded.run("cat /calls")
    assert "is-active --quiet holdfast.service" in calls
    if expected == "restart":
        assert "restart holdfast.service" in calls
        assert "was not restarted" not in shown
    else:
        assert "restart holdfast.service" not in calls
        assert expected in shown


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> BareRoot:
    """A root with the package installed, which an upgrade finds running."""
    bare = bare_root(tmp_path_factory.mktemp("upgraded"))
    shutil.copy(package("holdfast_*.deb"), bare.directory / "holdfast.deb")
    bare.run("apt-get update -q && apt-get install -y -q --no-install-recommends /holdfast.deb")
    for name in ("systemctl", "deb-systemd-invoke"):
        program = bare.directory / "usr/local/sbin" / name
        program.write_text('#!/bin/sh\necho "$@" >>/calls\n')
        program.chmod(0o755)
    (bare.directory / "run/systemd/system").mkdir(parents=True)
    return bare


def test_the_unit_of_the_debian_package(tmp_path: Path) -> None:
    run("dpkg-deb", "-x", package("holdfast_*.deb"), tmp_path)
    unit = tmp_path / "lib/systemd/system/holdfast.service"
    assert "Type=notify" in unit.read_text()
    command = next(each for each in unit.read_text().splitlines() if each.startswith("ExecStart="))
    program = command.removeprefix("ExecStart=").split()[0]
    assert (tmp_path / program[1:]).is_symlink()
    # The check looks for the program on this machine.
    checked = tmp_path / "holdfast.service"
    checked.write_text(unit.read_text().replace(program, sys.executable))
    run("systemd-analyze", "verify", "--man=no", checked)
    exposure = run("systemd-analyze", "security", "--offline=true", "--threshold=20", checked)
    assert "OK" in exposure.splitlines()[-1] or "exposure" in exposure


def test_the_image(tmp_path: Path) -> None:
    """Run as its own user, with a root that cannot be written."""
    image = package("holdfast-*-image.tar")
    assert image.stat().st_size < IMAGE_BYTES_MAX
    run("skopeo", "copy", "-q", f"docker-archive:{image}", f"oci:{tmp_path}/oci:holdfast")
    run("umoci", "unpack", "--image", f"{tmp_path}/oci:holdfast", tmp_path / "bundle")
    root = tmp_path / "bundle" / "rootfs"
    assert "10001:10001" in run("skopeo", "inspect", "--config", f"docker-archive:{image}")
    port, admin = free_port(), free_port()
    variables = (
        f"HOLDFAST_LISTENERS__0__PORT={port} HOLDFAST_ADMIN__PORT={admin}"
        " HOLDFAST_SECURITY__ALLOW_ANONYMOUS=true"
    )
    contained = (
        f"mount --bind {root} {root} && mount -t proc proc {root}/proc"
        f" && mount -t tmpfs -o mode=700,uid=10001,gid=10001 tmpfs {root}/var/lib/holdfast"
        f" && mount -o remount,ro,bind {root}"
        f" && exec env -i PATH=$PATH {variables} chroot --userspec=10001:10001 --groups= {root} $0"
    )

    def command(inside: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-ec", contained, inside]

    serve = command("/usr/bin/holdfast serve -c /etc/holdfast/holdfast.toml")
    with serving(serve, port) as first_s:
        run(*command("/usr/bin/holdfast-healthcheck"), timeout_s=60)
    dead = subprocess.run(command("/usr/bin/holdfast-healthcheck"), capture_output=True, text=True)
    assert dead.returncode == 1
    assert "does not reply" in dead.stderr
    print(f"\nimage: {image.stat().st_size / 1e6:.0f} MB, first message {first_s:.2f} s")
