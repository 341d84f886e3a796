#!/usr/bin/env bash
# Compiles the hot modules in place; says so and succeeds where there is no C compiler.
set -eu
python=$1
find src -name '*.so' -delete
find src -maxdepth 1 -name '*__mypyc*.so' -delete
echo "compiling the hot modules with mypyc (a minute or two)"
log=build/compile.log
if HOLDFAST_COMPILE=1 "$python" setup.py -q build_ext --inplace >"$log" 2>&1; then
  PYTHONPATH=src "$python" tools/is_compiled.py
elif grep -q '^HOLDFAST_COMPILE=1, but .* is missing$' "$log"; then
  echo "the hot modules run interpreted: $(tail -n 1 "$log")"
else
  tail -n 30 "$log" >&2
  exit 1
fi
