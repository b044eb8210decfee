#!/usr/bin/env bash
# The main job on a fresh machine: install, build, then take a small checkpoint in the released Kimi K3 layout through
# everything: convert, look, verify, reshard, run it (generate, evaluate), pack, read inside the tar, give back byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh
[ -d build ] || meson setup build -Dbuildtype=release -Dtests=false
ninja -C build

tessera=$PWD/build/cli/tessera
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
src=$work/hf
mkdir "$src"
cp tests/data/tiny-mxfp4/*.json tests/data/tiny-mxfp4/model-*.safetensors "$src"

step() { # prints a command as a person would type it, then runs it
    printf '\n$ %s\n' "tessera ${*//$work\//}"
    "$tessera" "$@"
}

step convert --dry-run "$src" "$work/ckpt"
step convert "$src" "$work/ckpt" --experts 4 --compress
step info "$work/ckpt"
step ls -l "$work/ckpt" 'layers.1.*'
step cat "$work/ckpt" layers.1.experts.7.gate.weight --slice 0:2,0:8
step verify --deep "$work/ckpt"
step reshard "$work/ckpt" "$work/wide" --experts 16
step diff "$work/ckpt" "$work/wide"
step backends
step generate "$work/wide" --prompt 'Tessera' --max-tokens 24 --temperature 1 --seed 7 --expert-cache 200KiB --stats
step eval "$work/wide" --text README.md --context 512
step pack "$work/wide" "$work/wide.tar"
step verify "$work/wide.tar"
step convert "$work/wide.tar" "$work/back"
printf '\n$ diff -r hf back\n'
diff -r "$src" "$work/back"
echo 'every file came back byte for byte'
