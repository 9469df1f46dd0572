#include "base/fp8.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/rms_norm.h"
#include "dense_layers/square_sum.h"

/* Element i of the rows that are squared and normalised. */
static float summed(const epmoe_rms_norm_args_t *args, int64_t t, int64_t i)
{
    if (args->residual) return epmoei_load(args->residual, args->dtype, t * args->residual_stride + i);
    return epmoei_load(args->x, args->dtype, t * args->x_stride + i);
}

static void add_residual(const epmoe_rms_norm_args_t *args, int64_t t)
{
    for (int64_t i = 0; i < args->hidden && args->residual; i++)
        epmoei_store(args->residual, args->dtype, t * args->residual_stride + i,
                     epmoei_load(args->x, args->dtype, t * args->x_stride + i) +
                         epmoei_load(args->residual, args->dtype, t * args->residual_stride + i));
}

static float normalised(const epmoe_rms_norm_args_t *args, int64_t t, int64_t i, float r)
{
    float w = epmoei_load(args->weight, args->weight_dtype, i) + (args->weight_offset ? 1.0f : 0.0f);
    return epmoei_round_to(summed(args, t, i) * r * w, args->quant == 0 ? args->y_dtype : args->dtype);
}

/* Columns [first, last) of row t with one scale: the given one, or that of their largest. */
static void quantise(const epmoe_rms_norm_args_t *args, int64_t t, int64_t first, int64_t last, float r, float *scale)
{
    float amax = 0;
    for (int64_t i = first; i < last; i++) amax = epmoei_amax(amax, normalised(args, t, i, r));
    if (args->quant != EPMOE_GRANULARITY_TENSOR) *scale = epmoei_e4m3_scale(amax);
    for (int64_t i = first; i < last; i++)
        ((uint8_t *)args->y)[t * args->y_stride + i] = epmoei_f32_to_e4m3(normalised(args, t, i, r) / *scale);
}

epmoe_status_t epmoei_rms_norm_ref(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_scale("static_scale", args->static_scale));
    int64_t d = args->hidden, group = args->quant == EPMOE_GRANULARITY_BLOCK128 ? 128 : d;
    for (int64_t t = 0; t < args->num_tokens; t++) {
        epmoei_square_sum_t sum = {{0}};
        add_residual(args, t);
        for (int64_t i = 0; i < d; i++) {
            double s = (double)summed(args, t, i);
            sum.lanes[i % EPMOEI_SQUARE_LANES] += s * s;
        }
        float r = epmoei_square_sum_rsqrt(&sum, d, args->eps);
        for (int64_t i = 0; i < d && args->quant == 0; i++)
            epmoei_store(args->y, args->y_dtype, t * args->y_stride + i, normalised(args, t, i, r));
        for (int64_t first = 0; first < d && args->quant != 0; first += group) {
            float scale = args->static_scale ? epmoei_load(args->static_scale, EPMOE_F32, 0) : 0;
            quantise(args, t, first, epmoei_min64(first + group, d), r, &scale);
            if (args->scale && !args->static_scale)
                epmoei_store(args->scale, EPMOE_F32, t * epmoei_rms_norm_scales(args) + first / group, scale);
        }
    }
    return EPMOE_OK;
}
