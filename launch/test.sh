#!/usr/bin/env bash
# Builds epmoe with its tests in build/ and runs them. Installs what is missing on Debian and Ubuntu, and says so.
#
#   launch/test.sh [ARGUMENT OF ctest...]       for example: launch/test.sh -R topk
#   SANITIZE=1 launch/test.sh                   the one-process tests under ASan, UBSan and LeakSanitizer, in build-asan/
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

need_to_build
need libcriterion-dev pkg-config
dir=build
options=(-DEPMOE_TESTS=ON -DEPMOE_WERROR=ON)
selection=()
if [ "${SANITIZE:-0}" != 0 ]; then
    dir=build-asan
    options+=("-DEPMOE_SANITIZE=address,undefined")
    selection=(-L cpu)
    export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
    export UBSAN_OPTIONS=print_stacktrace=1
    export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
fi
build "$dir" "${options[@]}"
# Some tests start up to 8 ranks.
mpi_environment 8
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "no GPU here: tests with the label gpu are left out"
    selection+=(-LE gpu)
fi
say "running: ctest --test-dir $dir --output-on-failure ${selection[*]} $*"
exec ctest --test-dir "$dir" --output-on-failure "${selection[@]}" "$@"
