#!/bin/sh -e
# One GPU: the whole layer in three dtypes, replayed from a graph, and a picture of the roofline.
cd "$(dirname "$0")/../../build"
for dtype in bf16 fp8 w4; do
    ./moe_layer_bench --backend cuda --model qwen3-30b-a3b --tokens 1,4,16,64,256,1024,4096 --dtype $dtype --format json
done >gpu_1.jsonl
../bench/plot.py gpu_1.jsonl --plot gpu_1.svg
