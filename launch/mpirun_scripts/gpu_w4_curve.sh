#!/bin/sh -e
# The same layer with bf16 experts and with 4-bit ones, over the number of tokens: a JSON object per line, for a plot.
#   launch/mpirun_scripts/gpu_w4_curve.sh >w4.jsonl; launch/w4_curve.py w4.jsonl docs/performance/w4_curve
cd "$(dirname "$0")/../../build"
./moe_layer_bench --backend cuda --model qwen3-30b-a3b --dtype bf16 --format json \
    --tokens 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192
./moe_layer_bench --backend cuda --model qwen3-30b-a3b --dtype w4 --format json \
    --tokens 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192
./moe_layer_bench --backend cuda --model qwen3-30b-a3b --dtype mxfp4 --format json \
    --tokens 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192
