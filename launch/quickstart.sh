#!/usr/bin/env bash
# Builds epmoe in build/ and runs the layer bench on 8 ranks, without or with a GPU, as root or not. Installs what is
# missing on Debian and Ubuntu, and says so.
#
#   launch/quickstart.sh [ARGUMENT OF moe_layer_bench...]
#   RANKS=2 launch/quickstart.sh --model mixtral-8x7b --tokens 16
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

ranks=${RANKS:-8}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "RANKS is '$ranks': expected a number of ranks"
need_to_build
# The tests have needs of their own; launch/test.sh adds them to the same folder.
if [ -f build/CMakeCache.txt ]; then build build; else build build -DEPMOE_TESTS=OFF; fi
mpi_environment "$ranks"
thread_environment "$ranks"
cd build
command=(mpirun -np "$ranks" ./moe_layer_bench "$@")
say "running, in build/: ${command[*]}"
exec "${command[@]}"
