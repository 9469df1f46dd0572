#!/bin/sh -e
# One rank with all cores: the layer without communication.
cd "$(dirname "$0")/../../build"
mpirun --bind-to none -np 1 ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 1,16,128
