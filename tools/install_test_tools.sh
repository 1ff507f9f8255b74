#!/usr/bin/env bash
# Puts Debian's chromium, prometheus and promtool here, for the tests that drive a real browser and a real
# Prometheus. Does nothing where they are. Tries several times: a mirror may be slow. Needs root, or sudo.
set -uo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
    echo "install_test_tools: no apt-get here; install ${missing[*]} by hand" >&2
    exit 1
fi
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
export DEBIAN_FRONTEND=noninteractive
options=(-qq -o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120)
for pause in 2 5 15 30 0; do
    "${as_root[@]}" apt-get "${options[@]}" update >/dev/null &&
        "${as_root[@]}" apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null &&
        exit 0
    echo "install_test_tools: apt-get failed; once more in $pause s" >&2
    sleep "$pause"
done
echo "install_test_tools: ${missing[*]} could not be installed" >&2
exit 1
