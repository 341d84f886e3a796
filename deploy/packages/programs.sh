#!/usr/bin/env bash
# Installs the named programs that are missing, from the Debian packages of the same names. Needs
# root. usage: programs.sh PROGRAM...
set -eu
missing=()
for program; do
  command -v "$program" >/dev/null || dpkg -s "$program" >/dev/null 2>&1 || missing+=("$program")
done
[ ${#missing[@]} -eq 0 ] && exit 0
echo "installing from Debian's packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
