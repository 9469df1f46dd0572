#include "dense_layers/dense_check.h"
#include "dense_layers/rope.h"
#include "dense_layers/rotate_head.h"
#include "kernels/row_blocks.h"

epmoe_status_t epmoei_rope_cpu(const epmoe_rope_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_indices("positions", args->positions, args->positions_dtype, args->num_tokens, 0,
                                      args->num_positions - 1));
    const epmoei_head_shape_t shape = {args->head_dim, args->rotary_dim, args->style, args->dtype};
    int64_t heads = (int64_t)args->num_heads + args->num_kv_heads, pieces = heads * args->num_tokens;
    float direction = args->inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) if (pieces * args->rotary_dim >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t t = piece / heads, h = piece % heads;
        int64_t position = epmoei_index(args->positions, args->positions_dtype, t);
        void *head = h < args->num_heads ? epmoei_at(args->q, args->dtype, t * args->q_stride + h * args->head_stride)
                                         : epmoei_at(args->k, args->dtype,
                                                     t * args->k_stride + (h - args->num_heads) * args->head_stride);
        epmoei_rotate_head(&shape, head, args->cos_sin + position * args->rotary_dim, direction, NULL);
    }
    return EPMOE_OK;
}
