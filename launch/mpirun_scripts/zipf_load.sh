#!/bin/sh -e
# The same layer under balanced and ever less balanced routing: the slowest rank decides.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --oversubscribe --bind-to none -np 8 -x OMP_NUM_THREADS=1 -x OPENBLAS_NUM_THREADS=1 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 16 --routing uniform
mpirun --oversubscribe --bind-to none -np 8 -x OMP_NUM_THREADS=1 -x OPENBLAS_NUM_THREADS=1 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 16 --routing zipf:1
mpirun --oversubscribe --bind-to none -np 8 -x OMP_NUM_THREADS=1 -x OPENBLAS_NUM_THREADS=1 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 16 --routing one-expert
