#!/bin/sh -e
# The ops of a decoder layer at d = 4096 and 7168 and f = 14336, one GPU, tables: for 1 and 16 tokens the time of a call
# in a graph of many, for more what it reaches of a copy ("of copy"), decode attention of the memory's read bandwidth ("of
# floor"), prefill attention in TFLOP/s, and sampling. Options are added to every run: --check=1 compares the results,
# --format json prints an object a line.
cd "$(dirname "$0")/../../build"
shape="--backend cuda --model mixtral-8x7b --top-k 1 --check=0"
ops=rms_norm_alone,rms_norm,rms_norm_fp8,silu_and_mul,silu_and_mul_fp8,rope,qk_norm_rope,rope_cache_write,cache_write

./moe_layer_bench $shape --op $ops --hidden 4096 --heads 32:8:128 --tokens 1,16,8192 "$@"
./moe_layer_bench $shape --op $ops --hidden 7168 --heads 56:8:128 --tokens 1,16,8192 "$@"
./moe_layer_bench $shape --op cache_write --tokens 65536 "$@"
./moe_layer_bench $shape --op attention --tokens 1,16,64 "$@"
./moe_layer_bench $shape --op prefill --tokens 8192 "$@"
./moe_layer_bench $shape --op sample --tokens 256 "$@"
