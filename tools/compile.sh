#!/usr/bin/env bash
# Compiles the hot modules in place; says so and succeeds where there is no C compiler.
set -eu
python=$1
find src/holdfast -name '*.so' -delete
find src -maxdepth 1 -name '*__mypyc*.so' -delete
echo "compiling the hot modules with mypyc (a minute or two)"
log=build/compile.log
if "$python" setup.py -q build_ext --inplace >"$log" 2>&1; then
  "$python" tools/is_compiled.py && exit 0
  echo "no C compiler or Python headers here: the hot modules run interpreted"
else
  tail -n 30 "$log" >&2
  exit 1
fi
