#!/usr/bin/env bash
# The main job on a fresh machine: install, build, then train a small model of the Kimi K3 family on real text through its context
# stages, with a planned interruption; look at it, reshard it, convert it to safetensors and back, let it write. Then a small
# checkpoint in the released layout goes through everything. Leaves the folder main-job/ to explore. About seven minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/setup.sh --text
[ -d build ] || meson setup build -Dbuildtype=release -Dtests=false
ninja -C build

tessera=$PWD/build/cli/tessera
export TESSERA_RECIPES=$PWD/recipes
hf_src=$PWD/tests/data/tiny-mxfp4
byte_model=$PWD/tools/byte_model.py
rm -rf main-job
mkdir main-job
cd main-job

step() { # prints a command as a person would type it, then runs it
    printf '\n$ tessera %s\n' "$*"
    "$tessera" "$@"
}
measure() { # checkpoint, file: how well it predicts the held-out text
    printf '\n$ tessera eval %s --text held.txt --context 2048\n' "$1"
    "$tessera" eval "$1" --text held.txt --context 2048 --json >"$2"
}

printf '== real text: the manuals of Perl and the help of Vim, as Debian and Ubuntu have them\n'
mkdir -p text/manuals text/help
cp "$(ls -d /usr/share/perl/5.*.* | head -n 1)"/pod/*.pod text/manuals/
cp /usr/share/vim/vim*/doc/*.txt text/help/
for f in text/*/*; do # a few files are not UTF-8
    iconv -f utf-8 -t utf-8 "$f" >/dev/null 2>&1 || rm -f "$f"
done
step data build text/manuals --held-out 0.05 --out manuals
step data build text/help --held-out 0.05 --seed 3 --out help
step data info manuals

printf '\n== training, stage by stage; it is stopped in the middle of the first one and goes on\n'
set -- tiny --set data.sources.0.path=manuals --set data.sources.1.path=help --out run
step plan tiny
step train "$@" --stop-at 250
step train "$@"

printf '\n== what came of it\n'
step info run
step verify run
ckpt=run/$(cat run/latest)
step ls -l "$ckpt" 'layers.1.moe.*'
for i in $(seq 0 99); do "$tessera" data show help --split held --doc "$i" 2>/dev/null || break; done >held.txt
truncate -s '<200000' held.txt
measure run eval.json
python3 - "$(python3 "$byte_model" manuals help held.txt)" <<'PY'
import json, sys
model, order3 = json.load(open('eval.json'))['bits_per_byte'], float(sys.argv[1])
print(f'held-out text: {model:.4f} bits a byte, a byte model of order 3 needs {order3:.4f}')
sys.exit(model >= order3)
PY
step generate run --prompt 'The following options' --max-tokens 120 --temperature 0.7 --seed 1
printf '\n'

printf '\n== other layouts and formats, and back\n'
step reshard "$ckpt" wide.tsr --experts 16
step diff "$ckpt" wide.tsr
step convert "$ckpt" hf --exclude 'optim.*'
step convert hf back.tsr
measure back.tsr back.json
python3 -c "import json; a, b = (json.load(open(f))['loss'] for f in ('eval.json', 'back.json')); print('the same loss to the bit:', a == b); exit(a != b)"
mkdir longer
step extend "$ckpt" "longer/$(cat run/latest)" --context 4096

printf '\n== a checkpoint in the released layout of Kimi K3\n'
mkdir released
cp "$hf_src"/*.json "$hf_src"/model-*.safetensors released
step convert --dry-run released k3.tsr
step convert released k3.tsr --experts 4 --compress
step cat k3.tsr layers.1.experts.7.gate.weight --slice 0:2,0:8
step verify --deep k3.tsr
step generate k3.tsr --prompt 'Tessera' --max-tokens 24 --temperature 1 --seed 7 --expert-cache 200KiB --stats
step pack k3.tsr k3.tar
step verify k3.tar
step convert k3.tar released-back
printf '\n$ diff -r released released-back\n'
diff -r released released-back
printf 'every file came back byte for byte\n\nto explore: main-job/run (metrics.jsonl, routing.h5, events/ for TensorBoard), main-job/hf, main-job/k3.tsr\n'
