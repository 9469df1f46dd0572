#!/usr/bin/env bash
# Builds the fuzz targets with Clang in build-fuzz/, under ASan and UBSan, and runs each from its corpus. What they find
# is left in build-fuzz/, and shown.
#
#   launch/fuzz.sh [SECONDS PER TARGET (default 60)] [TARGET...]      targets: safetensors config index checkpoint ...
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

seconds=${1:-60}
shift || true
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "SECONDS is '$seconds': expected a number"
command -v clang >/dev/null || die "there is no clang: install clang, libclang-rt-dev and libomp-dev (Debian's names)"
need_to_build
need libcriterion-dev
targets=("$@")
if [ $# -eq 0 ]; then
    for source in tests/fuzz/fuzz_*.c; do
        source=${source##*/fuzz_}
        targets+=("${source%.c}")
    done
fi
generator=()
if [ ! -f build-fuzz/CMakeCache.txt ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S . -B build-fuzz "${generator[@]}" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DEPMOE_FUZZ=ON \
    -DEPMOE_CUDA=OFF -DEPMOE_MPI=OFF
cmake --build build-fuzz --parallel "$(cores)" --target "${targets[@]/#/fuzz_}"
export ASAN_OPTIONS=detect_stack_use_after_return=0 EPMOE_ARCH=cpu OMP_NUM_THREADS=1
cd build-fuzz
for target in "${targets[@]}"; do
    # New inputs go to a folder of this build, never to the corpus that is committed.
    mkdir -p "corpus_$target"
    say "fuzz_$target, $seconds s"
    log=fuzz_$target.log
    if ! ./"fuzz_$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -close_fd_mask=3 \
        -artifact_prefix="$target-" "corpus_$target" "../tests/fuzz/corpus/$target" >"$log" 2>&1; then
        tail -n 60 "$log"
        die "fuzz_$target failed: the input lies in build-fuzz/, run build-fuzz/fuzz_$target FILE"
    fi
    tail -n 1 "$log"
done
