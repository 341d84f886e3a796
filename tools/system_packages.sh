#!/usr/bin/env bash
# What PyPI does not have, from Debian's packages: venv, a C compiler for the compiled form, and
# Mosquitto as the peer for interoperability tests and benchmarks, HAProxy in front of listeners,
# PostgreSQL for the test of an example, Prometheus for the alert rules, strace for the tests of
# syncs. Installs only what is missing.
set -eu
python=$1
wanted=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
command -v cc >/dev/null 2>&1 || wanted+=(gcc libc6-dev)
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
[ -e "$header" ] || wanted+=(python3-dev)
command -v mosquitto >/dev/null 2>&1 || [ -x /usr/sbin/mosquitto ] || wanted+=(mosquitto)
command -v haproxy >/dev/null 2>&1 || [ -x /usr/sbin/haproxy ] || wanted+=(haproxy)
command -v mosquitto_pub >/dev/null 2>&1 || wanted+=(mosquitto-clients)
{ command -v logrotate || [ -x /usr/sbin/logrotate ]; } >/dev/null 2>&1 || wanted+=(logrotate)
command -v promtool >/dev/null 2>&1 || wanted+=(prometheus)
command -v strace >/dev/null 2>&1 || wanted+=(strace)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || wanted+=(postgresql)
[ ${#wanted[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "not installed here: ${wanted[*]}. As root: apt-get install ${wanted[*]}" >&2
  echo "going on without them: no compiled form, no comparison with Mosquitto, or no test with PostgreSQL" >&2
  exit 0
fi
echo "installing from Debian's packages: ${wanted[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -q >/dev/null &&
  apt-get install -y -q --no-install-recommends "${wanted[@]}" >/dev/null; }; then
  echo "Debian's packages cannot be installed: going on without ${wanted[*]}" >&2
  exit 0
fi
# Debian starts its own Mosquitto on port 1883, and a PostgreSQL; the tests start theirs.
if [[ " ${wanted[*]} " == *" mosquitto "* ]] && command -v systemctl >/dev/null 2>&1; then
  systemctl disable --now mosquitto >/dev/null 2>&1 || true
fi
if [[ " ${wanted[*]} " == *" prometheus "* ]] && command -v systemctl >/dev/null 2>&1; then
  systemctl disable --now prometheus prometheus-node-exporter >/dev/null 2>&1 || true
fi
if [[ " ${wanted[*]} " == *" postgresql "* ]] && command -v systemctl >/dev/null 2>&1; then
  systemctl disable --now postgresql >/dev/null 2>&1 || true
fi
