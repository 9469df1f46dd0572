#!/bin/sh -e
# Eight ranks on one machine, a thread each: 16 of the 128 experts per rank.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --oversubscribe --bind-to none -np 8 -x OMP_NUM_THREADS=1 -x OPENBLAS_NUM_THREADS=1 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 1,16,128
