#include "dense_layers/dense_check.h"
#include "dense_layers/qk_norm_rope.h"
#include "dense_layers/square_sum.h"

/* Column i of the head that starts at element `head`, normalised. */
static float normalised(const epmoe_qk_norm_rope_args_t *args, int64_t head, const void *weight, float r, int64_t i)
{
    float w = epmoei_load(weight, args->weight_dtype, i) + (args->weight_offset ? 1.0f : 0.0f);
    return epmoei_load(args->qkv, args->dtype, head + i) * r * w;
}

static void norm_and_rotate(const epmoe_qk_norm_rope_args_t *args, int64_t head, const void *weight,
                            const float *cos_sin)
{
    epmoei_square_sum_t sum = {{0}};
    for (int64_t i = 0; i < args->head_dim; i++) {
        double x = (double)epmoei_load(args->qkv, args->dtype, head + i);
        sum.lanes[i % EPMOEI_SQUARE_LANES] += x * x;
    }
    float r = epmoei_square_sum_rsqrt(&sum, args->head_dim, args->eps);
    int64_t half = args->rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        int64_t first = args->style == EPMOE_ROPE_GPTJ ? 2 * i : i;
        int64_t second = args->style == EPMOE_ROPE_GPTJ ? 2 * i + 1 : i + half;
        float c = epmoei_load(cos_sin, EPMOE_F32, i), s = epmoei_load(cos_sin, EPMOE_F32, half + i);
        float a = normalised(args, head, weight, r, first), b = normalised(args, head, weight, r, second);
        epmoei_store(args->qkv, args->dtype, head + first, a * c - b * s);
        epmoei_store(args->qkv, args->dtype, head + second, b * c + a * s);
    }
    for (int64_t i = args->rotary_dim; i < args->head_dim; i++)
        epmoei_store(args->qkv, args->dtype, head + i, normalised(args, head, weight, r, i));
}

epmoe_status_t epmoei_qk_norm_rope_ref(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_indices("positions", args->positions, args->positions_dtype, args->num_tokens, 0,
                                      args->num_positions - 1));
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int64_t position = epmoei_index(args->positions, args->positions_dtype, t);
        const float *row = args->cos_sin + position * args->rotary_dim;
        for (int64_t h = 0; h < (int64_t)args->num_heads + args->num_kv_heads; h++)
            norm_and_rotate(args, t * args->qkv_stride + h * args->head_dim,
                            h < args->num_heads ? args->q_weight : args->k_weight, row);
    }
    return EPMOE_OK;
}
