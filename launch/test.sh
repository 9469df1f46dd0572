#!/usr/bin/env bash
# Builds epmoe with its tests in build/ and runs them. Installs what is missing on Debian and Ubuntu, and says so.
#
#   launch/test.sh [ARGUMENT OF ctest...]       for example: launch/test.sh -R topk
#   SANITIZE=1 launch/test.sh                   the one-process tests under ASan, UBSan and LeakSanitizer: build-asan/
#   EPMOE_WERROR=ON launch/test.sh              warnings are errors; otherwise build/ stays as it is configured
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

need_to_build
need libcriterion-dev pkg-config
dir=build
options=(-DEPMOE_TESTS=ON)
selection=()
if [ "${SANITIZE:-0}" != 0 ]; then
    dir=build-asan
    # Warnings stay warnings here: with a sanitizer GCC warns of paths that its own checks made.
    options+=("-DEPMOE_SANITIZE=address,undefined" -DEPMOE_WERROR=OFF -DEPMOE_CUDA=OFF)
    selection=(-L cpu)
    # GCC before 14 misaligns vectors of 64 bytes on the stack that detects a use after return.
    export ASAN_OPTIONS=detect_stack_use_after_return=0:strict_string_checks=1
    export UBSAN_OPTIONS=print_stacktrace=1
    export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
elif [ -n "${EPMOE_WERROR:-}" ]; then
    options+=("-DEPMOE_WERROR=$EPMOE_WERROR")
fi
build "$dir" "${options[@]}"
# Some tests start up to 8 ranks.
mpi_environment 8
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "no GPU here: tests with the label gpu are left out"
    selection+=(-LE gpu)
fi
command=(ctest --test-dir "$dir" --output-on-failure "${selection[@]}" "$@")
say "running: ${command[*]}"
exec "${command[@]}"
