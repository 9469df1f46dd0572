#include "dense_layers/attention.h"

#include "base/device.h"
#include "dense_layers/attention_plan.h"
#include "dense_layers/dense_check.h"

#include <math.h>

static epmoe_status_t check_sizes(epmoe_attention_args_t *args)
{
    EPMOEI_CHECK(epmoei_check_range("num_tokens", args->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_seqs", args->num_seqs, 0, INT32_MAX - 1));
    EPMOEI_CHECK(epmoei_check_range("num_heads", args->num_heads, 1, INT32_MAX));
    if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
    EPMOEI_CHECK(epmoei_check_range("num_kv_heads", args->num_kv_heads, 1, args->num_heads));
    if (args->num_heads % args->num_kv_heads)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_kv_heads is %d: expected a divisor of num_heads %d",
                           args->num_kv_heads, args->num_heads);
    EPMOEI_CHECK(epmoei_check_range("head_dim", args->head_dim, 1, EPMOE_MAX_HEAD_DIM));
    if (args->value_dim == 0) args->value_dim = args->head_dim;
    EPMOEI_CHECK(epmoei_check_range("value_dim", args->value_dim, 1, EPMOE_MAX_HEAD_DIM));
    EPMOEI_CHECK(epmoei_check_range("num_blocks", args->num_blocks, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("block_size", args->block_size, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("max_blocks", args->max_blocks, 0, INT32_MAX));
    return epmoei_check_volume("q", args->num_tokens, args->num_heads, epmoei_max64(args->head_dim, args->value_dim));
}

static epmoe_status_t check_cache(epmoe_attention_args_t *args)
{
    if (args->cache_dtype == EPMOE_DTYPE_NONE) args->cache_dtype = args->dtype;
    if (args->cache_dtype != args->dtype && args->cache_dtype != EPMOE_F8_E4M3)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "cache_dtype is %d (%s): expected %s as dtype, or f8_e4m3",
                           (int)args->cache_dtype, epmoe_dtype_string(args->cache_dtype),
                           epmoe_dtype_string(args->dtype));
    if (args->cache_dtype != EPMOE_F8_E4M3) args->k_scale = args->v_scale = NULL;
    EPMOEI_CHECK(epmoei_check_range("layout", (int32_t)args->layout, EPMOE_CACHE_LAYOUT_V1, EPMOE_CACHE_LAYOUT_HND));
    if (args->layout == EPMOE_CACHE_LAYOUT_V1) {
        if (args->key_pack == 0) args->key_pack = 16 / epmoe_dtype_size(args->cache_dtype);
        EPMOEI_CHECK(epmoei_check_range("key_pack", args->key_pack, 1, args->head_dim));
        if (args->head_dim % args->key_pack)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "key_pack is %d: expected a divisor of head_dim %d",
                               args->key_pack, args->head_dim);
    }
    if (!args->value_cache && args->num_tokens > 0 && args->value_dim > args->head_dim)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "value_dim is %d: without value_cache expected at most head_dim %d", args->value_dim,
                           args->head_dim);
    int64_t rows = (int64_t)args->block_size * args->num_kv_heads;
    EPMOEI_CHECK(epmoei_check_volume("key_cache", rows, EPMOE_MAX_HEAD_DIM, 1));
    EPMOEI_CHECK(
        epmoei_check_stride("key_block_stride", &args->key_block_stride, rows * args->head_dim, args->num_blocks));
    return epmoei_check_stride("value_block_stride", &args->value_block_stride, rows * args->value_dim,
                               args->num_blocks);
}

/* Everything but the pointers. */
static epmoe_status_t check_shape(epmoe_attention_args_t *out)
{
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (!out->value_cache && out->value_dim == 0 && out->num_tokens > 0 && out->num_seqs > 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "value_cache is NULL: expected a buffer, or value_dim columns of the keys");
    EPMOEI_CHECK(check_sizes(out));
    EPMOEI_CHECK(check_cache(out));
    EPMOEI_CHECK(epmoei_check_range("window", out->window, 0, INT32_MAX));
    if (out->scale == 0.0f) out->scale = 1.0f / sqrtf((float)out->head_dim);
    if (!isfinite(out->scale))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "scale is %g: expected a finite number", (double)out->scale);
    return epmoei_check_stride("q_stride", &out->q_stride, (int64_t)out->num_heads * out->head_dim, out->num_tokens);
}

epmoe_status_t epmoei_attention_check(const epmoe_attention_args_t *args, epmoe_attention_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_attention_args_t"));
    EPMOEI_CHECK(check_shape(out));
    EPMOEI_CHECK(epmoei_check_range("workspace_bytes", out->workspace_bytes, 0, INT64_MAX));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("q", out->q));
    EPMOEI_CHECK(epmoei_check_pointer("o", out->o));
    EPMOEI_CHECK(epmoei_check_pointer("query_start", out->query_start));
    if (out->num_seqs == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("seq_lens", out->seq_lens));
    if (out->max_blocks > 0) EPMOEI_CHECK(epmoei_check_pointer("block_table", out->block_table));
    return out->num_blocks > 0 ? epmoei_check_pointer("key_cache", out->key_cache) : EPMOE_OK;
}

static epmoe_status_t check_sequence(const epmoe_attention_args_t *args, int32_t seq)
{
    int32_t first = args->query_start[seq], end = args->query_start[seq + 1], length = args->seq_lens[seq];
    int64_t most = (int64_t)args->max_blocks * args->block_size;
    if (end < first || end > args->num_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "query_start[%d] is %d: expected %d to num_tokens %d", seq + 1,
                           end, first, args->num_tokens);
    if (length < 0 || length > most)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "seq_lens[%d] is %d: expected 0 to max_blocks * block_size %lld", seq, length,
                           (long long)most);
    if (length == 0 || end == first) return EPMOE_OK;
    if (end - first > length)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "seq_lens[%d] is %d: expected at least its %d queries, or 0",
                           seq, length, end - first);
    int32_t visible = epmoei_visible_keys(args, epmoei_query_position(args, seq, first)).first;
    for (int32_t i = visible / args->block_size; i <= (length - 1) / args->block_size; i++) {
        int32_t block = args->block_table[(int64_t)seq * args->max_blocks + i];
        if (block < 0 || block >= args->num_blocks)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "block_table[%d,%d] is %d: expected 0 to num_blocks - 1 = %d", seq, i, block,
                               args->num_blocks - 1);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_attention_check_data(const epmoe_attention_args_t *args)
{
    EPMOEI_CHECK(epmoei_check_scale("k_scale", args->k_scale));
    EPMOEI_CHECK(epmoei_check_scale("v_scale", args->value_cache ? args->v_scale : NULL));
    if (args->query_start[0] != 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "query_start[0] is %d: expected 0", args->query_start[0]);
    for (int32_t seq = 0; seq < args->num_seqs; seq++) EPMOEI_CHECK(check_sequence(args, seq));
    return EPMOE_OK;
}

epmoei_floor_t epmoei_attention_floor(const epmoe_attention_args_t *args)
{
    double width = (double)args->head_dim + args->value_dim, seen = 0, pairs = 0;
    for (int32_t seq = 0; seq < args->num_seqs; seq++) {
        int32_t first = args->query_start[seq], end = args->query_start[seq + 1];
        if (end == first || args->seq_lens[seq] == 0) continue;
        seen += args->seq_lens[seq] - epmoei_visible_keys(args, epmoei_query_position(args, seq, first)).first;
        for (int32_t token = first; token < end; token++) {
            epmoei_key_range_t range = epmoei_visible_keys(args, epmoei_query_position(args, seq, token));
            pairs += range.end - range.first;
        }
    }
    return (epmoei_floor_t){
        .bytes = args->num_tokens * width * args->num_heads * epmoe_dtype_size(args->dtype) +
                 seen * args->num_kv_heads * (args->value_cache ? width : args->head_dim) *
                     epmoe_dtype_size(args->cache_dtype),
        .flops = 2 * width * args->num_heads * pairs,
    };
}

epmoe_status_t epmoe_attention_workspace_size(const epmoe_attention_args_t *args, int64_t *bytes)
{
    epmoe_attention_args_t checked;
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoei_check_pointer("bytes", bytes));
    EPMOEI_CHECK(epmoei_copy_sized(&checked, sizeof checked, args, "epmoe_attention_args_t"));
    EPMOEI_CHECK(check_shape(&checked));
    EPMOEI_CHECK(epmoe_backend_resolve(checked.backend, &backend));
    const epmoei_device_info_t *device = epmoei_device_current();
    *bytes = 0;
    if (backend == EPMOE_BACKEND_CUDA && device)
        *bytes = epmoei_attention_plan(&checked, epmoei_cuda_tier(), device->num_sms, INT64_MAX).workspace_bytes;
    return EPMOE_OK;
}

epmoe_status_t epmoe_attention(const epmoe_attention_args_t *args, epmoe_stream_t stream)
{
    epmoe_attention_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_attention_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->attention)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_attention has no kernel on this backend");
    return table->attention(&checked, stream);
}
