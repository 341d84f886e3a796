"""A pair of ActiveMQ brokers on one directory, as in the study of failover.

Both brokers are those of Debian's package. The first one has the lock of the store and serves; the
other one tries the lock every ten seconds, which is ActiveMQ's default. They speak MQTT 3.1.1.
"""

import shutil
import signal
from pathlib import Path
from typing import Final

from holdfast_lab.targets.target import (
    Fault,
    Program,
    Target,
    TargetError,
    first_line,
    free_port,
    listens,
    program_path,
    wait_until,
)

HOME: Final = Path("/usr/share/activemq")
JAR: Final = HOME / "bin" / "activemq.jar"
JAVA: Final = Path("/usr/share/java")
CODECS: Final = ("mqtt-client.jar", "hawtdispatch.jar", "hawtdispatch-transport.jar")
"""The libraries of MQTT, which Debian's package does not depend on."""
MQTT_3_1_1: Final = 4
STOP_S: Final = 30.0
CONFIGURATION: Final = """\
<beans xmlns="http://www.springframework.org/schema/beans"
  xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
  xsi:schemaLocation="http://www.springframework.org/schema/beans
  http://www.springframework.org/schema/beans/spring-beans.xsd
  http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="pair" useJmx="false"
      dataDirectory="{data}">
    <persistenceAdapter><kahaDB directory="{data}/kahadb"/></persistenceAdapter>
    <transportConnectors>
      <transportConnector name="mqtt" uri="mqtt+nio://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"""
INSTALL: Final = "apt install activemq libmqtt-client-java libhawtdispatch-java"
SIGNALS: Final = {Fault.PLANNED: signal.SIGTERM, Fault.KILL: signal.SIGKILL}


class ActiveMqPair(Target):
    """Two ActiveMQ brokers; the second one takes over when the lock of the store is free."""

    name = "activemq"
    title = "ActiveMQ, a pair"
    faults = (Fault.PLANNED, Fault.KILL)
    survives_faults = True
    mqtt = MQTT_3_1_1

    def __init__(self, directory: Path) -> None:
        if not all(each.exists() for each in (JAR, *(JAVA / codec for codec in CODECS))):
            raise TargetError(f"activemq is not installed (on Debian: {INSTALL})")
        java = program_path("java")
        self.directory = directory
        self._hurt: Program | None = None
        self._brokers: list[Program] = []
        codecs = directory / "codecs"
        codecs.mkdir(parents=True)
        for codec in CODECS:
            (codecs / codec).symlink_to(JAVA / codec)
        for name in ("one", "two"):
            base = directory / name
            base.mkdir(parents=True)
            port = free_port()
            configuration = base / "activemq.xml"
            configuration.write_text(CONFIGURATION.format(data=directory / "data", port=port))
            command = [java, "-Xms64m", "-Xmx512m", f"-Dactivemq.home={HOME}"]
            command += [f"-Dactivemq.{each}={base}" for each in ("base", "conf", "data")]
            command += [
                "-jar",
                str(JAR),
                "start",
                "--extdir",
                str(codecs),
                f"xbean:file:{configuration}",
            ]
            self._brokers.append(Program(name, command, base, port))

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [f"127.0.0.1:{each.port}" for each in self._brokers]

    def start(self) -> None:
        """Starts both, one after the other. Raises `TargetError`."""
        first, second = self._brokers
        first.start()
        wait_until(lambda: listens(first.port), [first], "the broker listens")
        second.start()

    def stop(self) -> None:
        """Stops both and removes their files."""
        for each in self._brokers:
            if each.is_running():
                each.signal(signal.SIGKILL)
            each.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def version(self) -> str:
        """Returns the program and its version."""
        found = first_line(["dpkg-query", "-W", "-f", "${Package} ${Version}\n", "activemq"])
        return found.strip()

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [each.pid for each in self._brokers if each.is_running()]

    def inject(self, fault: Fault, topic: str) -> str:
        """Injects a fault into the broker that serves. Returns its name."""
        serving = next((each for each in self._brokers if listens(each.port)), None)
        if serving is None:
            raise TargetError("neither broker of the pair serves")
        self._hurt = serving
        serving.signal(SIGNALS[fault])
        return serving.name

    def heal(self) -> None:
        """Starts the former one again; it waits for the lock."""
        broker, self._hurt = self._hurt, None
        if broker is not None:
            if not broker.wait(STOP_S):
                raise TargetError(f"{broker.name} did not end within {STOP_S:g} s")
            broker.start()
            wait_until(
                lambda: any(listens(each.port) for each in self._brokers),
                self._brokers,
                "a broker of the pair serves",
            )
