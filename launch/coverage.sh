#!/usr/bin/env bash
# Line coverage of the host code by the tests that need no device: builds with gcc --coverage in build-coverage/, runs
# the tests of one process and those under mpirun, prints the coverage per folder and fails below 90 % of the library,
# the tools or the bench. Every process counts, forked or started by mpirun, unless it is killed. With gcovr installed it also
# writes the sources as HTML.
#
#   launch/coverage.sh [ARGUMENT OF ctest...]       for example: launch/coverage.sh -R topk
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

command -v gcov >/dev/null || die "there is no gcov: install gcc (Debian's name)"
command -v python3 >/dev/null || die "there is no python3: install python3 (Debian's name)"
need_to_build
need libcriterion-dev pkg-config
# Without optimization the references are too slow for the tests' limits. Threads share the counters.
CC=gcc CXX=g++ build build-coverage -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_C_FLAGS='-O2 -g --coverage -fprofile-update=atomic' -DEPMOE_CUDA=OFF -DEPMOE_MPI=ON -DEPMOE_TESTS=ON
find build-coverage -name '*.gcda' -delete
mpi_environment 8
# Counting makes loops four times as slow.
export EPMOE_TEST_SLOWDOWN=${EPMOE_TEST_SLOWDOWN:-4}
# These look at sources and symbols, or build elsewhere.
checks='^(layering|headers|api_reference|symbols|symbols_mpi|install|abi|abi_mpi)$'
failed=0
ctest --test-dir build-coverage --output-on-failure -L 'cpu|mpi' -E "$checks" "$@" || failed=1
if command -v gcovr >/dev/null; then
    mkdir -p build-coverage/html
    gcovr --root . --object-directory build-coverage --exclude tests/ --exclude build-coverage/ \
        --exclude-directories '.*/CompilerIdC.*' \
        --html-details build-coverage/html/index.html build-coverage
    say "the sources with their counts: build-coverage/html/index.html"
else
    say "there is no gcovr, which would write the sources with their counts as HTML: apt install gcovr (Debian's name)"
fi
launch/coverage.py build-coverage || failed=1
[ "$failed" = 0 ] || die "a test failed, or too little is covered"
