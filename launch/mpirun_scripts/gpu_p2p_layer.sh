#!/bin/sh -e
# The whole layer over p2p, replayed from a graph, then over nccl. Two ranks, a device each.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
for transport in p2p nccl; do
    mpirun -np 2 ./moe_layer_bench --backend cuda --transport $transport --model deepseek-v3 --tokens 1,16,128,1024,4096
done
