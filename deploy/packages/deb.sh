#!/usr/bin/env bash
# Builds dist/holdfast_VERSION_ARCH.deb from the wheel in dist/. usage: deb.sh PYTHON
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
umask 022
mkdir -p "$root/DEBIAN" "$root/etc/holdfast" "$root/usr/share/doc/holdfast"
chmod 755 "$work" "$root"
"$here/root.sh" "$python" "$root"
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')

install -Dm644 deploy/systemd/holdfast.service "$root/lib/systemd/system/holdfast.service"
sed -i 's#/usr/local/bin/holdfast#/usr/bin/holdfast#' "$root/lib/systemd/system/holdfast.service"
install -m644 "$here/debian/holdfast.toml" "$root/etc/holdfast/holdfast.toml"
install -m644 "$here/debian/copyright" "$root/usr/share/doc/holdfast/copyright"
gzip -9nc CHANGELOG.md >"$root/usr/share/doc/holdfast/changelog.gz"
install -m644 examples/holdfast.toml "$root/usr/share/doc/holdfast/"

complete() { # SHELL FILE
  mkdir -p "$(dirname "$root/$2")"
  PYTHONPATH=src "$python" -m holdfast.cli.main completion "$1" >"$root/$2"
}
complete bash usr/share/bash-completion/completions/holdfast
complete zsh usr/share/zsh/vendor-completions/_holdfast
complete fish usr/share/fish/vendor_completions.d/holdfast.fish

# Compiled here once, and not by each user: /usr is read-only for the broker.
"$python" -m compileall -q -s "$root" -p / --invalidation-mode unchecked-hash \
  "$root/usr/lib/holdfast/lib" || true

arch=all
find "$root/usr" -name '*.so' | grep -q . && arch=$(dpkg --print-architecture)
size=$(du -sk --exclude DEBIAN "$root" | cut -f1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@SIZE@/$size/" \
  "$here/debian/control" >"$root/DEBIAN/control"
install -Dm644 "$here/debian/default" "$root/etc/default/holdfast"
printf '%s\n' /etc/holdfast/holdfast.toml /etc/default/holdfast >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do install -m755 "$here/debian/$script" "$root/DEBIAN/"; done
(cd "$root" && find usr lib -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
mkdir -p dist
rm -f dist/*.deb
dpkg-deb --root-owner-group -Zxz --build "$root" dist >/dev/null
ls -l dist/*.deb
