#!/usr/bin/env bash
# checkcuda --small under compute-sanitizer, an op at a time, on the first visible device; needs a build in build/. The
# logs are left in build/sanitizers/, the summary is a line per run.
#
#   launch/gpu_sanitizers.sh [TOOL...]        tools: memcheck racecheck initcheck synccheck (default: all)
#   JOBS=8 launch/gpu_sanitizers.sh           as many runs at a time, each with its limit of 600 s; default 1
#   EPMOE_ARCH=sm80 OPS="grouped_gemm sum" launch/gpu_sanitizers.sh racecheck
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

ops=(topk align permute unpermute silu_and_mul sum grouped_gemm gemm_w4 grouped_gemm_fp8 experts_few route dequant pack_tiles
    quantize_fp8 gemm_quant few_quant linear rms_norm rope qk_norm_rope cache_write attention sample spec_verify)
[ -z "${OPS:-}" ] || read -r -a ops <<<"$OPS"
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)

# accepted TOOL OP: why a report of this tool on this op is not an error, or nothing.
accepted() {
    case $1-$2 in
    racecheck-gemm_w4 | racecheck-grouped_gemm_fp8 | racecheck-gemm_quant)
        echo "a lane arrives for its warp behind __syncwarp, which the tool does not follow"
        ;;
    initcheck-grouped_gemm_fp8) echo "scales come in runs of four, those behind the last row are not used" ;;
    esac
}

command -v compute-sanitizer >/dev/null || die "there is no compute-sanitizer: it comes with the CUDA Toolkit"
[ -x build/checkcuda ] || die "there is no build/checkcuda: build with CUDA first, for instance by launch/test.sh"
if ./build/checkcuda --small topk | grep '^skipped'; then exit 0; fi
mkdir -p build/sanitizers
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive

run_one() { # TOOL OP
    local log=build/sanitizers/$1-$2.log code=0 reason
    timeout 600 compute-sanitizer --tool "$1" --error-exitcode 9 ./build/checkcuda --small "$2" >"$log" 2>&1 &
    trap "kill $! 2>/dev/null; exit 1" TERM
    wait $! || code=$?
    reason=$(accepted "$1" "$2")
    if [ $code -eq 0 ]; then
        say "$1 $2: clean"
    elif [ $code -eq 9 ] && [ -n "$reason" ]; then
        say "$1 $2: $(grep -c 'Error:\|Uninitialized' "$log") reports, accepted: $reason"
    else
        say "$1 $2: FAILED ($code), see $log"
        return 1
    fi
}

[[ ${JOBS:-1} =~ ^[1-9][0-9]*$ ]] || die "JOBS is $JOBS: expected a number of 1 or more"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
failed=0 running=0
await_one() {
    wait -n || failed=1
    running=$((running - 1))
}
for tool in "${tools[@]}"; do
    for op in "${ops[@]}"; do
        [ $running -lt "${JOBS:-1}" ] || await_one
        run_one "$tool" "$op" &
        running=$((running + 1))
    done
done
while [ $running -gt 0 ]; do await_one; done
exit $failed
