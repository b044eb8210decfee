#!/usr/bin/env bash
# The whole test suite on a fresh machine: installs, builds with gcc and clang without a warning, runs every suite, then
# once more under AddressSanitizer and UndefinedBehaviorSanitizer. The last line counts: N passed, N failed, N skipped.
# CUDA is compiled once, where there is nvcc; its kernels run on the CPU in every build, and on a GPU where there is one.
#   --quick  one build, no sanitizers        --slow  adds the long suites (docs/TESTING.md)
set -uo pipefail
cd "$(dirname "$0")/.."

quick=0 slow=false
for arg in "$@"; do
    case $arg in
        --quick) quick=1 ;;
        --slow) slow=true ;;
        *) echo "usage: tools/run-tests.sh [--quick] [--slow]" >&2; exit 2 ;;
    esac
done

bash tools/setup.sh --tests || exit 1
out=${TSR_BUILD:-build-tests}
failed=0
logs=()

build() { # folder, then meson options
    local dir=$1
    shift
    rm -rf "$dir"
    meson setup "$dir" --werror "$@" >"$dir.setup.log" 2>&1 || { cat "$dir.setup.log"; return 1; }
    rm -f "$dir.setup.log"
    ninja -C "$dir" >"$dir/build.log" 2>&1 || { tail -n 60 "$dir/build.log"; return 1; }
}

suites() { # folder, then meson test options
    local dir=$1
    shift
    meson test -C "$dir" --print-errorlogs --num-processes 2 "$@" || failed=1
    logs+=("$dir/meson-logs/testlog.json")
}

echo "== gcc, all suites"
if build "$out" -Dslow_tests=$slow; then
    suites "$out"
else
    failed=1
fi
if [ "$quick" = 0 ]; then
    echo "== AddressSanitizer and UndefinedBehaviorSanitizer"
    if build "$out-san" -Dcuda=disabled -Db_sanitize=address,undefined -Db_lundef=false; then
        export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
        suites "$out-san"
        unset ASAN_OPTIONS UBSAN_OPTIONS
    else
        failed=1
    fi
    echo "== clang, no warnings"
    CC=clang CXX=clang++ build "$out-clang" -Dcuda=disabled || failed=1
fi

python3 - "$failed" "${logs[@]}" <<'PY'
import json, sys
passed = failures = skipped = 0
for path in sys.argv[2:]:
    for line in open(path):
        t = json.loads(line)
        result = t['result']
        if result in ('OK', 'EXPECTEDFAIL'):
            passed += 1
        elif result == 'SKIP':
            skipped += 1
            why = [w for w in (t.get('stdout') or '').split('\n') if w.startswith('skipped')]
            print(f"skipped {t['name']}: {(why or ['no reason given'])[-1]}")
        else:
            failures += 1
            print(f"failed {t['name']}: {result}")
if sys.argv[1] != '0' and failures == 0:
    failures = 1  # a build failed
print(f'{passed} passed, {failures} failed, {skipped} skipped')
sys.exit(failures != 0 or passed == 0)
PY
