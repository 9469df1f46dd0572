#include "base/fp8.h"
#include "kernels/activation.h"
#include "kernels/silu_and_mul.h"

/* Column i of row t, rounded. */
static float activated(const epmoe_silu_and_mul_args_t *args, int64_t t, int64_t i)
{
    float gate = epmoei_load(args->x, args->dtype, t * args->x_stride + i);
    float up = epmoei_load(args->x, args->dtype, t * args->x_stride + args->width + i);
    return epmoei_round_to(epmoei_activate(args->activation, gate, up, args->alpha, args->limit), args->dtype);
}

static void quantise(const epmoe_silu_and_mul_args_t *args, int64_t t)
{
    int64_t width = args->width, group = args->quant == EPMOE_GRANULARITY_BLOCK128 ? 128 : width;
    for (int64_t first = 0; first < width; first += group) {
        int64_t end = epmoei_min64(first + group, width);
        float amax = 0;
        for (int64_t i = first; i < end; i++) amax = epmoei_amax(amax, activated(args, t, i));
        float scale = args->static_scale ? *args->static_scale : epmoei_e4m3_scale(amax);
        if (!args->static_scale) args->scale[t * epmoei_ceil_div(width, group) + first / group] = scale;
        for (int64_t i = first; i < end; i++)
            ((uint8_t *)args->y)[t * args->y_stride + i] = epmoei_f32_to_e4m3(activated(args, t, i) / scale);
    }
}

epmoe_status_t epmoei_silu_and_mul_ref(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_silu_and_mul_check_values(args));
    for (int64_t t = 0; t < args->num_tokens; t++) {
        if (args->quant) quantise(args, t);
        for (int64_t i = 0; i < args->width && !args->quant; i++)
            epmoei_store(args->y, args->dtype, t * args->y_stride + i, activated(args, t, i));
    }
    return EPMOE_OK;
}
