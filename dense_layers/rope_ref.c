#include "dense_layers/dense_check.h"
#include "dense_layers/rope.h"

/* One head that starts at element `head` of data. */
static void rotate(const epmoe_rope_args_t *args, void *data, int64_t head, const float *cos_sin)
{
    int64_t half = args->rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        int64_t first = head + (args->style == EPMOE_ROPE_GPTJ ? 2 * i : i);
        int64_t second = head + (args->style == EPMOE_ROPE_GPTJ ? 2 * i + 1 : i + half);
        float c = epmoei_load(cos_sin, EPMOE_F32, i), s = epmoei_load(cos_sin, EPMOE_F32, half + i);
        float a = epmoei_load(data, args->dtype, first), b = epmoei_load(data, args->dtype, second);
        if (args->inverse) s = -s;
        epmoei_store(data, args->dtype, first, a * c - b * s);
        epmoei_store(data, args->dtype, second, b * c + a * s);
    }
}

epmoe_status_t epmoei_rope_ref(const epmoe_rope_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_indices("positions", args->positions, args->positions_dtype, args->num_tokens, 0,
                                      args->num_positions - 1));
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int64_t position = epmoei_index(args->positions, args->positions_dtype, t);
        const float *row = args->cos_sin + position * args->rotary_dim;
        for (int64_t h = 0; h < args->num_heads; h++)
            rotate(args, args->q, t * args->q_stride + h * args->head_stride, row);
        for (int64_t h = 0; h < args->num_kv_heads; h++)
            rotate(args, args->k, t * args->k_stride + h * args->head_stride, row);
    }
    return EPMOE_OK;
}
