#!/bin/sh -e
# Eight ranks on two machines. build/ lies at the same path on both, ssh from the first to the second needs no password.
# Where a machine has more than one network: --mca oob_tcp_if_include NET --mca btl_tcp_if_include NET (docs/running.md).
# Without a second machine, over two network namespaces: tests/two_hosts.sh --map-by ppr:2:node build/moe_layer_bench ...
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun --hostfile ../launch/mpirun_scripts/hostfile.example --map-by ppr:4:node --bind-to none -np 8 \
    -x OMP_NUM_THREADS=4 -x OPENBLAS_NUM_THREADS=4 \
    ./moe_layer_bench --backend cpu --model qwen3-30b-a3b --tokens 1,16,128
