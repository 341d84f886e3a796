"""The manifests of deploy/kubernetes and of the Helm chart as their own programs render them, and
pods of them as Podman containers."""

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.support.podman import Engine

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "holdfast"
TOOLS = ROOT / "build" / "deploy-tools"
KUBECTL = shutil.which("kubectl")
HELM = shutil.which("helm", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
GROUP = 10001
NETWORK = "pods"

ZONE_LABEL = "metadata.labels['topology.kubernetes.io/zone']"

Resources = dict[tuple[str, str], Any]


def documents(text: str) -> Resources:
    """The resources by kind and name."""
    found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def kustomize(directory: Path) -> str:
    assert KUBECTL is not None
    return _output(KUBECTL, "kustomize", str(directory))


def helm_template(release: str, values: dict[str, Any], directory: Path) -> str:
    """The chart rendered with these values."""
    assert HELM is not None
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return _output(HELM, "template", release, str(CHART), "-f", str(file))


def pod_of(resources: Resources) -> dict[str, Any]:
    (found,) = [each for (kind, _), each in resources.items() if kind == "StatefulSet"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def environment_of(pod: dict[str, Any], name: str, zone: str = "") -> dict[str, str]:
    """The variables of the pod with this name, as Kubernetes expands them. `zone`: its label, which
    older versions do not set."""
    found: dict[str, str] = {}
    for each in pod["containers"][0]["env"]:
        value = each.get("value", "")
        if "valueFrom" in each:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            assert path in ("metadata.name", ZONE_LABEL)
            value = name if path == "metadata.name" else zone
        for known, text in found.items():
            value = value.replace(f"$({known})", text)
        found[each["name"]] = value
    return found


class Pods:
    """The pods of a rendered StatefulSet: its containers with the same variables, user, limits,
    names, secrets and volumes, and with the owners and modes that a kubelet gives to files."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        resources: Resources,
        secrets: dict[str, dict[str, bytes]],
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.pod = pod_of(resources)
        (self.name,) = [name for kind, name in resources if kind == "StatefulSet"]
        spec = resources["StatefulSet", self.name]["spec"]
        self.service = spec["serviceName"]
        self.replicas: int = spec["replicas"]
        for volume in self.pod["volumes"]:
            files = directory / volume["name"]
            if "secret" in volume:
                content = secrets[volume["secret"]["secretName"]]
                mode = volume["secret"]["defaultMode"]
            else:
                found = resources["ConfigMap", volume["configMap"]["name"]]["data"]
                content = {name: text.encode() for name, text in found.items()}
                mode = 0o644
            _make_directory(files)
            for name, data in content.items():
                (files / name).write_bytes(data)
                os.chown(files / name, 0, GROUP)
                (files / name).chmod(mode)
        engine.run("network", "create", NETWORK)

    def volume(self, ordinal: int) -> Path:
        return self.directory / f"data-{self.name}-{ordinal}"

    def start(self, *ordinals: int) -> None:
        container = self.pod["containers"][0]
        security = self.pod["securityContext"]
        for ordinal in ordinals:
            name = f"{self.name}-{ordinal}"
            data = self.volume(ordinal)
            if not data.exists():
                _make_directory(data)
                # A new file system has it.
                (data / "lost+found").mkdir(mode=0o700)
            paths = {
                "data": data,
                **{each["name"]: self.directory / each["name"] for each in self.pod["volumes"]},
            }
            command = ["run", "-d", "--name", name, "--hostname", name, "--network", NETWORK]
            command += ["--network-alias", f"{name}.{self.service}"]
            command += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
            command += ["--group-add", str(security["fsGroup"])]
            command += ["--cap-drop", *container["securityContext"]["capabilities"]["drop"]]
            command += ["--security-opt", "no-new-privileges", "--pull", "never"]
            if container["securityContext"]["readOnlyRootFilesystem"]:
                command.append("--read-only")
            memory = container["resources"]["limits"]["memory"]
            command += ["--memory", memory.lower().removesuffix("i")]
            for key, value in environment_of(self.pod, name).items():
                command += ["-e", f"{key}={value}"]
            for mount in container["volumeMounts"]:
                option = ":ro" if mount.get("readOnly") else ""
                command += ["-v", f"{paths[mount['name']]}:{mount['mountPath']}{option}"]
            self.engine.run(*command, container["image"])

    def address(self, ordinal: int) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.engine.run("inspect", "-f", form, f"{self.name}-{ordinal}").strip()

    def probe(self, ordinal: int, name: str = "readinessProbe") -> bool:
        """The probe as a kubelet makes it, from the machine to the pod's address."""
        container = self.pod["containers"][0]
        request = container[name]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        url = f"http://{self.address(ordinal)}:{ports[request['port']]}{request['path']}"
        try:
            with urllib.request.urlopen(
                url, timeout=container[name]["timeoutSeconds"] + 3
            ) as reply:
                return bool(200 <= reply.status < 400)
        except (urllib.error.URLError, OSError):
            return False

    def execute(self, ordinal: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.engine.attempt("exec", f"{self.name}-{ordinal}", "holdfast", *arguments)

    def delete(self, *ordinals: int) -> None:
        """SIGTERM, then SIGKILL after the grace period. The volumes stay."""
        for ordinal in ordinals:
            grace = str(self.pod["terminationGracePeriodSeconds"])
            self.engine.run("stop", "-t", grace, f"{self.name}-{ordinal}")
            self.engine.run("rm", "-f", f"{self.name}-{ordinal}")

    def lose(self, ordinal: int) -> None:
        """Kill the pod and delete its volume."""
        self.engine.run("kill", f"{self.name}-{ordinal}")
        self.engine.run("rm", "-f", f"{self.name}-{ordinal}")
        self.delete_volume(ordinal)

    def delete_volume(self, ordinal: int) -> None:
        shutil.rmtree(self.volume(ordinal))


def _make_directory(path: Path) -> None:
    """A directory as a kubelet makes it for fsGroup."""
    path.mkdir()
    os.chown(path, 0, GROUP)
    path.chmod(0o2775)
