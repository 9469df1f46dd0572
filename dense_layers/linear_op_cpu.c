#include "base/fp8.h"
#include "dense_layers/linear_op.h"
#include "kernels/quantize_fp8.h"

/* wide = the values of the codes. */
static void widen(const epmoe_linear_args_t *args, const uint8_t *codes, const float *scales, float *wide)
{
    int64_t k = args->k, group = args->x_quant == EPMOE_GRANULARITY_BLOCK128 ? EPMOEI_FP8_COLUMNS : k;
    int64_t groups = args->x_quant == EPMOE_GRANULARITY_TENSOR ? 0 : epmoei_ceil_div(k, group);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t first = 0; first < k; first += group) {
            int64_t end = epmoei_min64(first + group, k);
            float scale = scales[t * groups + first / group];
#pragma omp simd
            for (int64_t i = first; i < end; i++) wide[t * k + i] = epmoei_e4m3_to_f32(codes[t * k + i]) * scale;
        }
}

epmoe_status_t epmoei_linear_cpu(const epmoe_linear_args_t *args, epmoe_stream_t stream)
{
    epmoei_linear_space_t space;
    EPMOEI_CHECK(epmoei_linear_place(args, EPMOE_BACKEND_CPU, &space));
    epmoe_grouped_gemm_args_t gemm = epmoei_linear_gemm_args(args, EPMOE_BACKEND_CPU);
    if (space.codes) EPMOEI_CHECK(epmoei_linear_quantize(args, EPMOE_BACKEND_CPU, &space, stream));
    if (space.wide)
        widen(args, space.codes ? space.codes : args->x, space.codes ? space.x_scale : args->x_scale, space.wide);
    gemm.x = space.wide ? space.wide : args->x;
    gemm.workspace = space.inner;
    gemm.workspace_bytes = space.inner_bytes;
    return epmoe_grouped_gemm(&gemm, stream);
}
