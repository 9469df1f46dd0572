#include "dense_layers/rope.h"

#include "dense_layers/dense_check.h"

/* A stride of 0 becomes that of `heads` heads side by side; the last head must fit before the next token. */
static epmoe_status_t check_token_stride(const char *name, int64_t *stride, const epmoe_rope_args_t *args,
                                         int32_t heads)
{
    int64_t last = heads > 0 ? heads - 1 : 0;
    EPMOEI_CHECK(epmoei_check_volume(name, last + 1, args->head_stride, 1));
    if (*stride == 0) *stride = (last + 1) * args->head_stride;
    return epmoei_check_stride(name, stride, last * args->head_stride + args->head_dim, args->num_tokens);
}

epmoe_status_t epmoei_rope_check(const epmoe_rope_args_t *args, epmoe_rope_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_rope_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_heads", out->num_heads, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_kv_heads", out->num_kv_heads, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("head_dim", out->head_dim, 2, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_rotary_dim(&out->rotary_dim, out->head_dim));
    EPMOEI_CHECK(epmoei_check_range("style", (int32_t)out->style, EPMOE_ROPE_NEOX, EPMOE_ROPE_GPTJ));
    EPMOEI_CHECK(epmoei_check_range("inverse", out->inverse, 0, 1));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    EPMOEI_CHECK(epmoei_check_stride("head_stride", &out->head_stride, out->head_dim, 1));
    EPMOEI_CHECK(check_token_stride("q_stride", &out->q_stride, out, out->num_heads));
    EPMOEI_CHECK(check_token_stride("k_stride", &out->k_stride, out, out->num_kv_heads));
    EPMOEI_CHECK(epmoei_check_index_dtype("positions_dtype", &out->positions_dtype));
    EPMOEI_CHECK(epmoei_check_range("num_positions", out->num_positions, 1, INT32_MAX));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("q", out->q));
    if (out->num_kv_heads) EPMOEI_CHECK(epmoei_check_pointer("k", out->k));
    EPMOEI_CHECK(epmoei_check_pointer("positions", out->positions));
    return epmoei_check_pointer("cos_sin", out->cos_sin);
}

epmoei_floor_t epmoei_rope_floor(const epmoe_rope_args_t *args)
{
    double heads = (double)args->num_heads + args->num_kv_heads;
    double rotated = 2 * heads * args->rotary_dim * epmoe_dtype_size(args->dtype);
    double row = 4.0 * args->rotary_dim + epmoe_dtype_size(args->positions_dtype);
    return (epmoei_floor_t){.bytes = args->num_tokens * (rotated + row),
                            .flops = args->num_tokens * heads * args->rotary_dim * 3};
}

epmoe_status_t epmoe_rope(const epmoe_rope_args_t *args, epmoe_stream_t stream)
{
    epmoe_rope_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_rope_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->rope) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_rope has no kernel on this backend");
    return table->rope(&checked, stream);
}
