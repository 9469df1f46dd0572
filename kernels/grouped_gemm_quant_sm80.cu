#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/grouped_gemm_quant.h"

extern "C" int64_t epmoei_grouped_gemm_quant_workspace_sm80(const epmoe_grouped_gemm_args_t *args)
{
    return epmoei_gemm_order_x_bytes(args);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_quant_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t)
{
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "weight.format is %s", epmoe_format_string(args->weight.format));
}
