#include "dense_layers/linear_op.h"

#if EPMOE_HAVE_CUDA

#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/linear_cublas.h"

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
    return epmoe_grouped_gemm(&gemm, stream);
}

#endif
