#!/bin/sh -e
# Two hosts of eight GPUs: NCCL between them. build/ lies at the same path on both, ssh from the first to the second needs
# no password; NCCL_SOCKET_IFNAME, if it is needed, is passed on with -x.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --hostfile ../launch/mpirun_scripts/hostfile_gpu.example --map-by ppr:8:node --bind-to none -np 16 -x NCCL_DEBUG=WARN \
    ./moe_layer_bench --backend cuda --transport nccl --model deepseek-v3 --tokens 16,128,1024
