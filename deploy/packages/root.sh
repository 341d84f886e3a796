#!/usr/bin/env bash
# Lays out an installed Holdfast for Debian's Python: /usr/lib/holdfast, a virtual environment with
# the libraries that Debian lacks, and /usr/bin/holdfast. usage: root.sh PYTHON DIRECTORY
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$2
cd "$(dirname "$0")/../.."
# Debian's Python, not the one that builds: the environment links to it.
version=${DEBIAN_PYTHON:-3.11}
tag=cp${version/./}
shopt -s nullglob
wheels=(dist/holdfast-*-"$tag"-*.whl)
[ ${#wheels[@]} -gt 0 ] || wheels=(dist/holdfast-*-py3-none-any.whl)
[ ${#wheels[@]} -eq 1 ] || { echo "no wheel in dist/: run make wheel" >&2; exit 1; }
home=$root/usr/lib/holdfast
packages=$home/lib/python$version/site-packages
mkdir -p "$home/bin" "$packages" "$root/usr/bin"
glibc=()
for minor in $(seq 36 -1 17); do glibc+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
"$python" -m pip install --quiet --no-compile --target "$packages" --only-binary :all: \
  --python-version "$version" --implementation cp --abi "$tag" --abi abi3 --abi none \
  "${glibc[@]}" --platform "manylinux2014_$(uname -m)" "${wheels[0]}[auth]"
rm -rf "$packages/bin"
find "$packages" \( -name tests -o -name test -o -name __pycache__ \) -type d -prune -exec rm -rf {} +
# Sources of C extensions, which no program reads.
find "$packages" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.c' -o -name '*.h' \) -delete
find "$packages" -name '*.so' -exec strip --strip-unneeded {} +
ln -sf "/usr/bin/python$version" "$home/bin/python3"
cat >"$home/pyvenv.cfg" <<EOF
home = /usr/bin
include-system-site-packages = false
version = $version
EOF
cat >"$home/bin/holdfast" <<'EOF'
#!/usr/lib/holdfast/bin/python3
import sys

from holdfast.cli.main import main

sys.exit(main())
EOF
chmod 755 "$home/bin/holdfast"
ln -sf ../lib/holdfast/bin/holdfast "$root/usr/bin/holdfast"
