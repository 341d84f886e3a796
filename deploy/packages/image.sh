#!/usr/bin/env bash
# Builds dist/holdfast-VERSION-image.tar, for `docker load` and `podman load`, from the wheel in
# dist/ and a few Debian packages: no registry, no shell, no package manager in the image. Needs
# root and Debian. usage: image.sh PYTHON
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
"$here/programs.sh" buildah
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
root=$work/root
umask 022
mkdir -p "$work/debs" "$root"

# Debian's Python with the libraries that it links to. Without the interactive ones: the image has
# no terminal.
packages=(base-files netbase tzdata ca-certificates media-types libc6 libgcc-s1 zlib1g libbz2-1.0
  liblzma5 libexpat1 libffi8 libsqlite3-0 libssl3 libuuid1 libcrypt1 libpython3.11-minimal
  libpython3.11-stdlib python3.11-minimal)
(cd "$work/debs" && apt-get download -q "${packages[@]}" >/dev/null 2>"$work/log") ||
  { cat "$work/log" >&2; exit 1; }
# What scanners of images read: which packages are in it.
mkdir -p "$root/var/lib/dpkg/status.d"
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$root"
  dpkg-deb -f "$deb" >"$root/var/lib/dpkg/status.d/$(dpkg-deb -f "$deb" Package)"
done
"$here/root.sh" "$python" "$root"
# Certificates for tokens and HTTP checks; update-ca-certificates would do the same.
mkdir -p "$root/etc/ssl/certs"
cat "$root"/usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root"/usr/share/{doc,man,locale,bug,lintian,doc-base,info,bash-completion,menu} \
  "$root"/usr/share/ca-certificates "$root"/usr/share/python3 \
  "$root"/usr/lib/python3.11/{idlelib,lib2to3,pydoc_data,turtledemo,distutils,ensurepip,test} \
  "$root"/usr/lib/*/gconv "$root"/usr/lib/*/audit "$root"/usr/lib/*/perl*
"$python" -m compileall -q -s "$root" -p / --invalidation-mode unchecked-hash \
  "$root/usr/lib/holdfast/lib" "$root/usr/lib/python3.11" || true

echo 'root:x:0:0:root:/root:/sbin/nologin' >"$root/etc/passwd"
echo 'holdfast:x:10001:10001::/var/lib/holdfast:/sbin/nologin' >>"$root/etc/passwd"
printf 'root:x:0:\nholdfast:x:10001:\n' >"$root/etc/group"
mkdir -p "$root/etc/holdfast" "$root/tmp" "$root/var/lib/holdfast"
chmod 1777 "$root/tmp"
chmod 700 "$root/var/lib/holdfast"
chown 10001:10001 "$root/var/lib/holdfast"
install -m644 "$here/image.toml" "$root/etc/holdfast/holdfast.toml"
install -m755 "$here/healthcheck" "$root/usr/bin/holdfast-healthcheck"

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
export BUILDAH_FORMAT=docker BUILDAH_ISOLATION=chroot
store=(buildah --storage-driver vfs --root "$work/store" --runroot "$work/run")
container=$("${store[@]}" from scratch)
# `buildah copy` would give everything to root, and a new volume gets the owner of this directory.
mounted=$("${store[@]}" mount "$container")
cp -a "$root/." "$mounted"
"${store[@]}" umount "$container" >/dev/null
"${store[@]}" config --user 10001:10001 --workingdir /var/lib/holdfast --volume /var/lib/holdfast \
  --port 1883/tcp --port 18083/tcp --env LANG=C.UTF-8 --env PYTHONDONTWRITEBYTECODE=1 \
  --entrypoint '["/usr/bin/holdfast"]' --cmd 'serve -c /etc/holdfast/holdfast.toml' \
  --stop-signal SIGTERM --healthcheck 'CMD /usr/bin/holdfast-healthcheck' \
  --healthcheck-interval 5s --healthcheck-timeout 3s --healthcheck-start-period 10s \
  --label org.opencontainers.image.title=holdfast \
  --label "org.opencontainers.image.version=$version" \
  --label org.opencontainers.image.licenses=Apache-2.0 "$container"
mkdir -p dist
target=dist/holdfast-$version-image.tar
rm -f dist/*-image.tar
"${store[@]}" commit -q --format docker "$container" \
  "docker-archive:$target:holdfast:$version" >/dev/null
"${store[@]}" rm "$container" >/dev/null
du -sm "$root" | sed "s/\t.*/ MB unpacked/"
ls -l "$target"
