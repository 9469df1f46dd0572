#include "dense_layers/qk_norm_rope.h"

#include "dense_layers/dense_check.h"

epmoe_status_t epmoei_qk_norm_rope_check(const epmoe_qk_norm_rope_args_t *args, epmoe_qk_norm_rope_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_qk_norm_rope_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_heads", out->num_heads, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_kv_heads", out->num_kv_heads, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("head_dim", out->head_dim, 2, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_rotary_dim(&out->rotary_dim, out->head_dim));
    EPMOEI_CHECK(epmoei_check_range("style", (int32_t)out->style, EPMOE_ROPE_NEOX, EPMOE_ROPE_GPTJ));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (out->weight_dtype == EPMOE_DTYPE_NONE) out->weight_dtype = out->dtype;
    EPMOEI_CHECK(epmoei_check_float_dtype("weight_dtype", out->weight_dtype));
    int64_t heads = (int64_t)out->num_heads + 2 * (int64_t)out->num_kv_heads;
    EPMOEI_CHECK(epmoei_check_volume("qkv", heads, out->head_dim, 1));
    EPMOEI_CHECK(epmoei_check_stride("qkv_stride", &out->qkv_stride, heads * out->head_dim, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_eps(&out->eps));
    EPMOEI_CHECK(epmoei_check_range("weight_offset", out->weight_offset, 0, 1));
    EPMOEI_CHECK(epmoei_check_index_dtype("positions_dtype", &out->positions_dtype));
    EPMOEI_CHECK(epmoei_check_range("num_positions", out->num_positions, 1, INT32_MAX));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("qkv", out->qkv));
    EPMOEI_CHECK(epmoei_check_pointer("q_weight", out->q_weight));
    EPMOEI_CHECK(epmoei_check_pointer("k_weight", out->k_weight));
    EPMOEI_CHECK(epmoei_check_pointer("positions", out->positions));
    return epmoei_check_pointer("cos_sin", out->cos_sin);
}

epmoei_floor_t epmoei_qk_norm_rope_floor(const epmoe_qk_norm_rope_args_t *args)
{
    double values = ((double)args->num_heads + args->num_kv_heads) * args->head_dim;
    double row = 4.0 * args->rotary_dim + epmoe_dtype_size(args->positions_dtype);
    return (epmoei_floor_t){.bytes = args->num_tokens * (2 * values * epmoe_dtype_size(args->dtype) + row)};
}

epmoe_status_t epmoe_qk_norm_rope(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream)
{
    epmoe_qk_norm_rope_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_qk_norm_rope_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->qk_norm_rope)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_qk_norm_rope has no kernel on this backend");
    return table->qk_norm_rope(&checked, stream);
}
