#!/usr/bin/env bash
# Installs what Tessera needs on Debian 12+ or Ubuntu 22.04+. Idempotent; asks for root rights by sudo only when needed.
# --tests adds what only the test suite needs, --text the text that the main job trains on.
set -euo pipefail

packages=(gcc libc6-dev meson ninja-build pkg-config libhdf5-dev libzstd-dev libarchive-dev libjansson-dev libyajl-dev libxxhash-dev libopenblas-dev
          libpcre2-dev libyaml-dev python3)
[ "${1:-}" = --tests ] && packages+=(clang g++ libcmocka-dev python3-h5py python3-numpy hdf5-tools mandoc clang-format
           libopenmpi-dev openmpi-bin)
[ "${1:-}" = --text ] && packages+=(perl-doc vim-runtime)

missing=()
for p in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ "${#missing[@]}" -gt 0 ]; then
    root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    export DEBIAN_FRONTEND=noninteractive
    "${root[@]}" apt-get update -q
    "${root[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"
fi
# Ubuntu 22.04 has a Meson that is too old; the Python package index has a newer one.
if dpkg --compare-versions "$(meson --version)" lt 1.0; then
    root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    "${root[@]}" apt-get install -q -y --no-install-recommends python3-pip
    "${root[@]}" python3 -m pip install -q 'meson>=1.0'
fi
# libFuzzer and the sanitizers of clang come in a package named after clang's version.
if [ "${1:-}" = --tests ]; then
    version=$(clang --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -n 1)
    if ! dpkg-query -W "libclang-rt-$version-dev" >/dev/null 2>&1; then
        root=()
        [ "$(id -u)" -eq 0 ] || root=(sudo)
        "${root[@]}" apt-get install -q -y --no-install-recommends "libclang-rt-$version-dev" || true # before clang 14 it is part of clang
    fi
fi
