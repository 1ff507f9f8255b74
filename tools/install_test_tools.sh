#!/usr/bin/env bash
# Puts Debian's chromium, prometheus, promtool and npm here, and axe-core from npm into .tools/, for the tests
# that drive a real browser and a real Prometheus. Does nothing where they are. Tries several times: a mirror may
# be slow. Needs root, or sudo, for Debian's packages.
set -uo pipefail
cd "$(dirname "$0")/.."

AXE=4.14.1 # https://github.com/dequelabs/axe-core: what a browser can find of WCAG's rules by itself

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
command -v npm >/dev/null || missing+=(npm)

debian() {
    local options=(
        -qq -o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120
    )
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get "${options[@]}" update >/dev/null &&
        "${as_root[@]}" apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null
}

axe() {
    local folder
    folder=$(mktemp -d) &&
        npm pack --silent "axe-core@$AXE" --pack-destination "$folder" >/dev/null 2>&1 &&
        tar -xzf "$folder/axe-core-$AXE.tgz" -C "$folder" &&
        mkdir -p .tools && rm -f .tools/axe-core-*.js &&
        mv "$folder/package/axe.min.js" ".tools/axe-core-$AXE.js"
    local done=$?
    rm -rf "$folder"
    return $done
}

# insist COMMAND: until it works, five times
insist() {
    for pause in 2 5 15 30 0; do
        "$1" && return
        echo "install_test_tools: $1 failed; once more in $pause s" >&2
        sleep "$pause"
    done
    echo "install_test_tools: $1 could not be installed" >&2
    exit 1
}

if [ ${#missing[@]} -gt 0 ]; then
    if ! command -v apt-get >/dev/null; then
        echo "install_test_tools: no apt-get here; install ${missing[*]} by hand" >&2
        exit 1
    fi
    insist debian
fi
[ -f ".tools/axe-core-$AXE.js" ] || insist axe
