#!/usr/bin/env bash
# The machine code of the hot kernels holds its values in registers, and a kernel that hands registers from one warpgroup
# to others (setmaxnreg) starts with as many as its __launch_bounds__ leave: with fewer they would wait for ever. Reads
# the compiled objects; needs no device. Code for 8.0 may index a small array on the stack.
#   registers_check.sh CUOBJDUMP OBJECT...
# 77 when there is no CUOBJDUMP.
set -euo pipefail
cuobjdump=$1
shift
if ! command -v "$cuobjdump" >/dev/null; then
    echo "skipped: no cuobjdump"
    exit 77
fi

# Source, part of the kernel's mangled name, registers of a thread at its start; - = any number.
hot='
grouped_gemm_sm80.cu       grouped_gemm_kernel                -
grouped_gemm_wide_sm80.cu  grouped_gemm_wide_kernel           -
grouped_gemm_sm90.cu       grouped_gemm_kernelI[^,]*Li64E     80
grouped_gemm_sm90.cu       grouped_gemm_kernelI[^,]*Li256E    168
grouped_gemm_fp8_sm90.cu   grouped_gemm_fp8_kernel            168
grouped_gemm_w4_sm90.cu    grouped_gemm_w4_kernel.*pair_t     80
grouped_gemm_w4_sm90.cu    grouped_gemm_w4_kernel.*narrow_t   96
grouped_gemm_w4_sm90.cu    grouped_gemm_w4_kernel.*middle_t   128
grouped_gemm_w4_sm90.cu    grouped_gemm_w4_kernel.*wide_t     168
grouped_gemm_quant_sm80.cu grouped_gemm_quant_kernel          -
experts_few_sm80.cu        gate_up_kernel                     -
experts_few_sm80.cu        down_kernel                        -
experts_few_quant_sm80.cu  gate_up_kernel                     -
experts_few_quant_sm80.cu  down_kernel                        -
route_sm80.cu              route_rows_kernel                  -
topk_sm80.cu               topk_rows_kernel                   -
sum_sm90.cu                row_sum_ring_kernel                -
attention_prefill_sm90.cu  wgmma_kernel                       168
attention_prefill_sm80.cu  prefill_kernel                     -
attention_decode_sm80.cu   decode_kernel                      -
attention_latent_sm80.cu   latent_kernel                      -
'

failed=0 kernels=0
while read -r source name registers; do
    [ -n "$source" ] || continue
    object=
    for candidate in "$@"; do
        if [ "${candidate##*/}" = "$source.o" ]; then object=$candidate; fi
    done
    if [ -z "$object" ]; then
        echo "$source: no object" >&2
        failed=1
        continue
    fi
    # One line a kernel: architecture, name, REG:n, STACK:n, LOCAL:n.
    found=$("$cuobjdump" --dump-resource-usage "$object" | awk -v name="$name" '
        $1 == "arch" { arch = $3 }
        $1 == "Function" { kernel = $2 }
        /REG:/ && kernel ~ name { print arch, kernel, $1, $2, $4 }')
    if [ -z "$found" ]; then
        echo "$source: no kernel $name" >&2
        failed=1
        continue
    fi
    while read -r arch kernel reg stack local; do
        kernels=$((kernels + 1))
        if [ "$local" != LOCAL:0 ] || { [ "$stack" != STACK:0 ] && [ "$arch" != sm_80 ]; }; then
            echo "$source $arch $kernel: $stack $local, expected 0 of both" >&2
            failed=1
        fi
        if [ "$registers" != - ] && [ "$reg" != "REG:$registers" ]; then
            echo "$source $arch $kernel: $reg, expected $registers" >&2
            failed=1
        fi
    done <<<"$found"
done <<<"$hot"
echo "$kernels hot kernels"
exit $failed
