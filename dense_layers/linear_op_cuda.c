#include "dense_layers/linear_op.h"

#if EPMOE_HAVE_CUDA

#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/linear_cublas.h"
#include "kernels/grouped_gemm.h"
#include "kernels/grouped_gemm_fp8.h"

static epmoei_linear_run_t make_run(const epmoe_linear_args_t *args, const epmoei_linear_space_t *space,
                                    epmoe_stream_t stream)
{
    return (epmoei_linear_run_t){.backend = EPMOE_BACKEND_CUDA,
                                 .stream = stream,
                                 .dtype = args->x_dtype,
                                 .workspace = space->inner,
                                 .workspace_bytes = space->inner_bytes};
}

static epmoei_linear_t make_linear(const epmoe_linear_args_t *args)
{
    return (epmoei_linear_t){
        .n = args->n, .k = args->k, .heads = 1, .format = args->weight.format, .weight = args->weight.data};
}

/* Codes with a scale per token that were made here: what the product reads, as they are. */
static epmoe_status_t multiply_made(const epmoe_grouped_gemm_args_t *gemm, const epmoei_linear_space_t *space,
                                    epmoe_stream_t stream)
{
    const epmoei_kernel_table_t *kernels;
    const epmoei_fp8_rows_t rows = {.codes = space->codes, .scales = space->x_scale, .stride = 0};
    epmoe_grouped_gemm_args_t checked;
    EPMOEI_CHECK(epmoei_kernels(EPMOE_BACKEND_CUDA, &kernels));
    EPMOEI_CHECK(epmoei_grouped_gemm_check(gemm, &checked));
    if (!kernels->grouped_gemm_fp8_rows || !epmoei_grouped_gemm_fp8_takes_sm90(&checked))
        return epmoe_grouped_gemm(gemm, stream); /* which says why not */
    return kernels->grouped_gemm_fp8_rows(&checked, &rows, NULL, stream);
}

epmoe_status_t epmoei_linear_sm80(const epmoe_linear_args_t *args, epmoe_stream_t stream)
{
    epmoei_linear_space_t space;
    EPMOEI_CHECK(epmoei_check_aligned("x", args->x, 16));
    EPMOEI_CHECK(epmoei_check_aligned("weight.data", args->weight.data, 16));
    EPMOEI_CHECK(epmoei_check_aligned("x_scale", args->x_scale, 4));
    EPMOEI_CHECK(epmoei_check_aligned("weight.scales", args->weight.scales, 16));
    EPMOEI_CHECK(epmoei_check_aligned("bias", args->bias, 16));
    EPMOEI_CHECK(epmoei_check_aligned("y", args->y, 16));
    EPMOEI_CHECK(epmoei_check_aligned("workspace", args->workspace, 16));
    EPMOEI_CHECK(epmoei_linear_place(args, EPMOE_BACKEND_CUDA, &space));
    if (epmoei_linear_makes_codes(args)) EPMOEI_CHECK(epmoei_linear_quantize(args, EPMOE_BACKEND_CUDA, &space, stream));
    if (args->x_quant == 0 && !args->bias && args->weight.format == epmoei_format_of_dtype(args->x_dtype) &&
        args->x_dtype != EPMOE_F32) {
        epmoei_linear_run_t run = make_run(args, &space, stream);
        epmoei_linear_t linear = make_linear(args);
        bool done;
        EPMOEI_CHECK(epmoei_linear_cublas(&run, &linear, args->num_tokens, args->x, args->y_dtype, args->y, &done));
        if (done) return EPMOE_OK;
    }
    epmoe_grouped_gemm_args_t gemm = epmoei_linear_gemm_args(args, EPMOE_BACKEND_CUDA, &space);
    if (space.codes && args->x_quant == EPMOE_GRANULARITY_TOKEN) return multiply_made(&gemm, &space, stream);
    return epmoe_grouped_gemm(&gemm, stream);
}

#endif
