#!/usr/bin/env bash
# The CPU path under ThreadSanitizer, in build-tsan/: Clang and its OpenMP runtime, whose barriers the sanitizer knows
# (GCC's it does not). Criterion cannot run there: programs of their own do.
#
#   launch/tsan.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

command -v clang >/dev/null || die "there is no clang: install clang, libclang-rt-dev and libomp-dev (Debian's names)"
need_to_build
need libcriterion-dev
generator=()
if [ ! -f build-tsan/CMakeCache.txt ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S . -B build-tsan "${generator[@]}" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DEPMOE_SANITIZE=thread \
    -DEPMOE_CUDA=OFF -DEPMOE_MPI=OFF
cmake --build build-tsan --parallel "$(cores)" --target threads soak moe_tool
export TSAN_OPTIONS=ignore_noninstrumented_modules=1 EPMOE_ARCH=cpu
cd build-tsan
for threads in 1 2 4; do
    export OMP_NUM_THREADS=$threads
    say "threads and soak with $threads OpenMP threads"
    ./threads
    ./soak 400
done
for checkpoint in ../tests/data/golden/*/; do
    say "moe_tool check $checkpoint"
    OMP_NUM_THREADS=2 ./moe_tool check "$checkpoint" >/dev/null
done
