#!/bin/sh -e
# Dispatch and combine alone, each way and as a pair, over p2p, nccl and mpi, and how many times as fast as nccl: all
# multiprocessors, then 24. Two ranks, a device each.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun -np 2 ./moe_layer_bench --backend cuda --transport p2p --op exchange --model deepseek-v3 \
    --tokens 1,8,32,128,512,1024,4096,8192
mpirun -np 2 ./moe_layer_bench --backend cuda --transport p2p --op exchange --model deepseek-v3 --comm-sms 24 \
    --tokens 1024,4096,8192
