#!/usr/bin/env bash
# Runs the bench on a small checkpoint in two dtypes and plots the lines: a picture with both series, their floors and
# the stages, and refusals of what is no run. 77 where Matplotlib is missing.
#   plot_check.sh SOURCE_DIR BUILD_DIR PYTHON
set -euo pipefail
source=$1 build=$2 python=$3
# The first Python of these that has Matplotlib.
for candidate in "$python" python3 /usr/bin/python3; do
    if "$candidate" -c 'import matplotlib' 2>/dev/null; then
        python=$candidate
        break
    fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    printf 'plot check: %s\n' "$*" >&2
    exit 1
}
plot() { MPLCONFIGDIR=$work "$python" "$source/bench/plot.py" "$@"; }

for dtype in bf16 fp32; do
    OMP_NUM_THREADS=1 "$build/moe_layer_bench" --backend cpu --checkpoint "$source/tests/data/golden/mixtral" \
        --tokens 1,4,16 --iters 2 --warmup 1 --dtype $dtype --format json
done >"$work/runs.jsonl"
plot "$work/runs.jsonl" --plot "$work/out.svg" || exit $?
for part in 'measured bf16' 'measured fp32' 'roof bf16' 'roof fp32' 'stage router' 'stage gemm1' 'stage gemm2'; do
    grep -q "id=\"$part" "$work/out.svg" || fail "the picture lacks '$part'"
done
if grep -q 'id="stage act"' "$work/out.svg"; then fail 'a stage of no time is drawn'; fi

# The bench draws its own cases; what it cannot draw it says before it measures.
export EPMOE_PYTHON=$python MPLCONFIGDIR=$work OMP_NUM_THREADS=1
bench() { "$build/moe_layer_bench" --backend cpu --checkpoint "$source/tests/data/golden/mixtral" --iters 2 "$@"; }
bench --tokens 2,8 --plot "$work/own.svg" >"$work/table" 2>"$work/said" || fail 'the bench does not draw'
grep -q 'own.svg: 2 cases' "$work/said" || fail 'the bench does not say what it drew'
for part in 'measured bf16' 'roof bf16' 'stage gemm1'; do
    grep -q "id=\"$part" "$work/own.svg" || fail "the bench's picture lacks '$part'"
done
code=0
bench --plot "$work/none.gif" >/dev/null 2>"$work/errors" || code=$?
[ $code -eq 2 ] && grep -q '\.svg' "$work/errors" || fail "a picture that is none gives $code"
# One iteration is the fastest and the slowest; a case without tokens has nothing to draw.
bench --iters 1 --warmup 0 --tokens 0,1,2,3,4,5 --format json --plot "$work/one.svg" >"$work/lines" 2>"$work/said" ||
    fail 'single iterations are not drawn'
grep -q 'one.svg: 5 cases' "$work/said" || fail 'not the five cases with tokens are drawn'
if grep -qv '^{' "$work/lines"; then fail 'what is drawn is said between the lines'; fi
code=0
bench --plot "$work/none.svg" --op topk >/dev/null 2>"$work/errors" || code=$?
[ $code -eq 2 ] || fail "--plot with --op gives $code"
code=0
EPMOE_PYTHON=$work/nowhere bench --plot "$work/none.svg" >"$work/table" 2>"$work/errors" || code=$?
[ $code -eq 3 ] && grep -q EPMOE_PYTHON "$work/errors" || fail "a Python that is not there gives $code"
if grep -q ceilings "$work/table"; then fail 'it was measured all the same'; fi
code=0
bench --tokens 2 --plot "$work/no/such/folder.svg" >/dev/null 2>"$work/errors" || code=$?
[ $code -eq 2 ] && grep -q 'was not drawn' "$work/errors" || fail "a folder that is not there gives $code"

# Worked by hand: 2 TFLOP/s in 30 us with a floor of 10 us is a roof of 6; runs are sorted by tokens.
"$python" - "$source/bench" <<'END'
import sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import plot
assert plot.roof({"tflops": 2.0, "us_median": 30.0, "floor_us": 10.0}) == 6.0
assert plot.most_tokens([3, 9, 0]) == 9
same = {"model": "m", "ranks": 2, "transport": "mpi", "arch": "a", "device": None}
groups = plot.series([{**same, "dtype": "w4", "tokens": 8}, {**same, "dtype": "w4", "tokens": 2},
                      {**same, "dtype": "bf16", "tokens": 1}])
assert {label: [run["tokens"] for run in runs] for label, runs in groups.items()} == {"w4": [2, 8], "bf16": [1]}, groups
END
if echo 'no JSON' | plot - --plot "$work/none.svg" 2>"$work/errors"; then fail 'text that is no JSON is plotted'; fi
grep -q 'line 1 is not JSON' "$work/errors" || fail 'the message does not name the line'
if echo '{"op":"topk"}' | plot - --plot "$work/none.svg" 2>"$work/errors"; then fail 'an op is plotted as a layer'; fi
[ ! -e "$work/none.svg" ] || fail 'a failed plot leaves a file'
