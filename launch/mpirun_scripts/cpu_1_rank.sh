#!/bin/sh -e
# One rank with all cores: the layer without communication.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --bind-to none -np 1 ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 1,16,128
