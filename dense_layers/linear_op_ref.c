#include "base/dtype.h"
#include "base/fp8.h"
#include "dense_layers/linear_op.h"
#include "kernels/quant_formats.h"
#include "kernels/quantize_fp8.h"

#include <stddef.h>

/* Column k of row t, as it lies in memory. */
static float stored_x(const epmoe_linear_args_t *args, int64_t t, int64_t k)
{
    int64_t at = t * args->k + k;
    return args->x_dtype == EPMOE_F8_E4M3 ? epmoei_e4m3_to_f32(((const uint8_t *)args->x)[at])
                                          : epmoei_load(args->x, args->x_dtype, at);
}

/* The largest magnitude in columns [first,end) of rows [row,last). */
static float amax_of(const epmoe_linear_args_t *args, int64_t row, int64_t last, int64_t first, int64_t end)
{
    float amax = 0;
    for (int64_t t = row; t < last; t++)
        for (int64_t k = first; k < end; k++) amax = epmoei_amax(amax, stored_x(args, t, k));
    return amax;
}

/* The scale of columns [first,end) of row t, which are those that share one. */
static float scale_of_x(const epmoe_linear_args_t *args, int64_t t, int64_t first, int64_t end, float of_tensor)
{
    int64_t blocks = epmoei_ceil_div(args->k, EPMOEI_FP8_COLUMNS);
    bool codes = args->x_dtype == EPMOE_F8_E4M3;
    switch (args->x_quant) {
    case EPMOE_GRANULARITY_TENSOR: return of_tensor;
    case EPMOE_GRANULARITY_TOKEN:
        return codes ? args->x_scale[t] : epmoei_e4m3_scale(amax_of(args, t, t + 1, first, end));
    default:
        return codes ? args->x_scale[t * blocks + first / EPMOEI_FP8_COLUMNS]
                     : epmoei_e4m3_scale(amax_of(args, t, t + 1, first, end));
    }
}

static float value_of_x(const epmoe_linear_args_t *args, int64_t t, int64_t k, float scale)
{
    float value = stored_x(args, t, k);
    if (args->x_quant == 0) return value;
    if (args->x_dtype != EPMOE_F8_E4M3) value = epmoei_e4m3_to_f32(epmoei_f32_to_e4m3(value / scale));
    return value * scale;
}

/* The value of w[n,k], and the column of x that it multiplies. */
static float value_of_w(const epmoe_linear_args_t *args, const epmoei_quant_t *quant, int64_t n, int64_t k,
                        int64_t *column)
{
    *column = k;
    if (!quant) return epmoei_load(args->weight.data, epmoei_dtype_of_format(args->weight.format), n * args->k + k);
    if (quant->format == EPMOE_FORMAT_W4 && quant->g_idx) *column = epmoei_quant_index(quant, k);
    return epmoei_quant_at(quant, n, k);
}

epmoe_status_t epmoei_linear_ref(const epmoe_linear_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    bool quantised = epmoei_format_is_quantised(args->weight.format),
         by_block = args->x_quant == EPMOE_GRANULARITY_BLOCK128;
    epmoei_quant_t quant;
    if (quantised) quant = epmoei_quant_of_weight(&args->weight, args->n, args->k, 0, 0);
    int64_t group = by_block ? EPMOEI_FP8_COLUMNS : args->k;
    float of_tensor = 1;
    if (args->x_quant == EPMOE_GRANULARITY_TENSOR)
        of_tensor = args->x_scale ? *args->x_scale : epmoei_e4m3_scale(amax_of(args, 0, args->num_tokens, 0, args->k));
    for (int64_t t = 0; t < args->num_tokens; t++) {
        float of_row = scale_of_x(args, t, 0, args->k, of_tensor);
        for (int64_t n = 0; n < args->n; n++) {
            float sum = 0;
            for (int64_t first = 0; first < args->k; first += group) {
                int64_t end = epmoei_min64(first + group, args->k), column;
                float scale = by_block ? scale_of_x(args, t, first, end, of_tensor) : of_row;
                for (int64_t k = first; k < end; k++) {
                    float w = value_of_w(args, quantised ? &quant : NULL, n, k, &column);
                    sum += value_of_x(args, t, column, scale) * w;
                }
            }
            epmoei_store(args->y, args->y_dtype, t * args->n + n, sum + (args->bias ? args->bias[n] : 0.0f));
        }
    }
    return EPMOE_OK;
}
