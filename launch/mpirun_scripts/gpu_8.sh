#!/bin/sh -e
# Eight GPUs of one host, a rank each, their experts reached over NVLink; then a table of dispatch and combine alone.
# As root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd "$(dirname "$0")/../../build"
mpirun -np 8 ./moe_layer_bench --backend cuda --transport p2p --model deepseek-v3 --tokens 1,16,128,1024,4096
mpirun -np 8 ./moe_layer_bench --backend cuda --op exchange --model deepseek-v3 --tokens 16,128,4096
