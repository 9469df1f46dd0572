#include "dense_layers/dense_check.h"
#include "dense_layers/qk_norm_rope.h"
#include "dense_layers/rotate_head.h"
#include "dense_layers/square_sum.h"
#include "kernels/row_blocks.h"

static float head_rsqrt(const epmoe_qk_norm_rope_args_t *args, const void *head)
{
    float values[EPMOEI_BLOCK_COLS];
    epmoei_square_sum_t sum = {{0}};
    for (int64_t first = 0; first < args->head_dim; first += EPMOEI_BLOCK_COLS) {
        int64_t cols = epmoei_min64(EPMOEI_BLOCK_COLS, args->head_dim - first);
        epmoei_to_f32(values, epmoei_at(head, args->dtype, first), args->dtype, cols);
        epmoei_square_sum_add(&sum, values, cols);
    }
    return epmoei_square_sum_rsqrt(&sum, args->head_dim, args->eps);
}

epmoe_status_t epmoei_qk_norm_rope_cpu(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_indices("positions", args->positions, args->positions_dtype, args->num_tokens, 0,
                                      args->num_positions - 1));
    const epmoei_head_shape_t shape = {args->head_dim, args->rotary_dim, args->style, args->dtype};
    int64_t heads = (int64_t)args->num_heads + args->num_kv_heads, pieces = heads * args->num_tokens;
#pragma omp parallel for schedule(static) if (pieces * args->head_dim >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t t = piece / heads, h = piece % heads;
        int64_t position = epmoei_index(args->positions, args->positions_dtype, t);
        void *head = epmoei_at(args->qkv, args->dtype, t * args->qkv_stride + h * args->head_dim);
        epmoei_head_norm_t norm = {h < args->num_heads ? args->q_weight : args->k_weight, args->weight_dtype,
                                   args->weight_offset ? 1.0f : 0.0f, head_rsqrt(args, head)};
        epmoei_rotate_head(&shape, head, args->cos_sin + position * args->rotary_dim, 1, &norm);
    }
    return EPMOE_OK;
}
