#!/usr/bin/env bash
# mpirun as testing needs it on any machine: as root, with fewer cores than ranks, one thread each.
#   mpirun.sh RANKS PROGRAM [ARGUMENT...]
set -euo pipefail
ranks=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
exec timeout 100 mpirun --oversubscribe --bind-to none -np "$ranks" "$@"
