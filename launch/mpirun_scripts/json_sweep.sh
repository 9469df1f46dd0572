#!/bin/sh -e
# One JSON object per line and token count, for a plot: json_sweep.sh >runs.jsonl; bench/plot.py runs.jsonl --plot out.svg
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --oversubscribe --bind-to none -np 2 -x OMP_NUM_THREADS=1 -x OPENBLAS_NUM_THREADS=1 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 1,2,4,8,16,32,64,128 --format json
