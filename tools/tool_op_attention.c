#include "tools/tool_op_dense.h"

#include "base/device.h"
#include "dense_layers/attention.h"
#include "dense_layers/sample.h"

/* ------------------------------------------------------------------------------------------------------ attention */

const op_tensor_t op_attention_tensors[] = {
    {.name = "q", .shape = "T,H,D", .kind = OP_FLOAT},
    {.name = "key_cache", .shape = "as layout says", .kind = OP_NUMBERS, .any_shape = true},
    /* Without it the values are the first columns of the keys. */
    {.name = "value_cache", .shape = "as layout says", .kind = OP_NUMBERS, .any_shape = true, .optional = true},
    {.name = "k_scale", .shape = "1", .kind = OP_F32, .optional = true},
    {.name = "v_scale", .shape = "1", .kind = OP_F32, .optional = true},
    {.name = "block_table", .shape = "B,M", .kind = OP_INDEX},
    {.name = "seq_lens", .shape = "B", .kind = OP_INDEX},
    {.name = "query_start", .shape = "Q", .kind = OP_INDEX},
    {.name = "sinks", .shape = "H", .kind = OP_AS_F32, .optional = true},
    {0},
};
const op_key_t op_attention_keys[] = {
    {.name = "layout", .kind = OP_CHOICE, .choices = OP_CACHE_LAYOUTS, .initial = "v1"},
    {.name = "scale", .kind = OP_REAL},
    {.name = "window", .kind = OP_LIMIT, .initial = "0"},
    {.name = "kv_heads", .kind = OP_COUNT},
    {.name = "value_dim", .kind = OP_COUNT},
    {0},
};

/* Heads, blocks and widths from the shapes of the caches; value_dim is the width of a value where there is a
 * value_cache. */
static epmoe_status_t take_cache_shape(const op_context_t *context, epmoe_attention_args_t *args)
{
    const op_value_t *key = op_tensor(context, "key_cache"), *value = op_tensor(context, "value_cache");
    int64_t d = args->head_dim, blocks = -1, size = -1, packs = -1, pack = -1;
    int64_t heads = op_has(context, "kv_heads") ? op_number(context, "kv_heads") : -1;
    int64_t value_d = op_has(context, "value_dim") ? op_number(context, "value_dim") : -1;
    if (!value->present && value_d < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'value_cache' is missing: expected it, or value_dim "
                                                         "for the first columns of the keys");
    if (args->layout == EPMOE_CACHE_LAYOUT_V1) {
        EPMOEI_CHECK(op_match_cache("key_cache", key, 5, (int64_t *const[]){&blocks, &heads, &packs, &size, &pack},
                                    "[N,Hk,D/x,bs,x]"));
        if (packs * pack != d)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "tensor 'key_cache' has %lld packs of %lld: expected the head's %lld columns",
                               (long long)packs, (long long)pack, (long long)d);
        if (value->present)
            EPMOEI_CHECK(op_match_cache("value_cache", value, 4, (int64_t *const[]){&blocks, &heads, &value_d, &size},
                                        "[N,Hk,Dv,bs]"));
        args->key_pack = (int32_t)pack;
    } else {
        bool nhd = args->layout == EPMOE_CACHE_LAYOUT_NHD;
        int64_t *const keys[] = {&blocks, nhd ? &size : &heads, nhd ? &heads : &size, &d};
        int64_t *const values[] = {&blocks, nhd ? &size : &heads, nhd ? &heads : &size, &value_d};
        EPMOEI_CHECK(op_match_cache("key_cache", key, 4, keys, nhd ? "[N,bs,Hk,D]" : "[N,Hk,bs,D]"));
        if (value->present)
            EPMOEI_CHECK(op_match_cache("value_cache", value, 4, values, nhd ? "[N,bs,Hk,Dv]" : "[N,Hk,bs,Dv]"));
    }
    if (value->present && value->dtype != key->dtype)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor 'value_cache' has dtype %s: expected that of "
                           "key_cache, %s",
                           epmoe_dtype_string(value->dtype), epmoe_dtype_string(key->dtype));
    if (heads == 0 || value_d == 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has no %s: expected at least one",
                           heads == 0 ? "key_cache" : "value_cache", heads == 0 ? "heads" : "columns");
    args->num_kv_heads = (int32_t)heads;
    args->value_dim = (int32_t)value_d;
    args->num_blocks = (int32_t)blocks;
    args->block_size = (int32_t)size;
    return EPMOE_OK;
}

/* A device takes lengths and blocks as they are. */
static epmoe_status_t check_attention_data(const op_context_t *context, const epmoe_attention_args_t *args)
{
    epmoe_attention_args_t checked;
    EPMOEI_CHECK(epmoei_attention_check(args, &checked));
    if (args->backend != EPMOE_BACKEND_CUDA || checked.num_tokens == 0) return EPMOE_OK;
    checked.block_table = op_tensor(context, "block_table")->host;
    checked.seq_lens = op_tensor(context, "seq_lens")->host;
    checked.query_start = op_tensor(context, "query_start")->host;
    if (checked.k_scale) checked.k_scale = op_tensor(context, "k_scale")->host;
    if (checked.v_scale) checked.v_scale = op_tensor(context, "v_scale")->host;
    return epmoei_attention_check_data(&checked);
}

epmoe_status_t op_attention_run(op_context_t *context)
{
    const op_value_t *q = op_tensor(context, "q"), *key_cache = op_tensor(context, "key_cache");
    epmoe_attention_args_t args = EPMOE_ATTENTION_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.num_seqs = op_dim(context, 'B');
    args.num_heads = op_dim(context, 'H');
    args.head_dim = op_dim(context, 'D');
    args.max_blocks = op_dim(context, 'M');
    args.dtype = q->dtype;
    args.cache_dtype = key_cache->dtype;
    args.layout = (epmoe_cache_layout_t)op_number(context, "layout");
    args.window = op_number(context, "window") < 0 ? 0 : op_number(context, "window");
    args.scale = op_real(context, "scale");
    args.q = q->data;
    args.key_cache = key_cache->data;
    args.value_cache = op_tensor(context, "value_cache")->data;
    args.k_scale = op_tensor(context, "k_scale")->data;
    args.v_scale = op_tensor(context, "v_scale")->data;
    args.block_table = op_tensor(context, "block_table")->data;
    args.seq_lens = op_tensor(context, "seq_lens")->data;
    args.query_start = op_tensor(context, "query_start")->data;
    args.sinks = op_tensor(context, "sinks")->data;
    if (op_dim(context, 'Q') != (int64_t)args.num_seqs + 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor 'query_start' has %d elements: expected %lld, one more "
                           "than seq_lens",
                           op_dim(context, 'Q'), (long long)args.num_seqs + 1);
    EPMOEI_CHECK(take_cache_shape(context, &args));
    args.o = op_output(context, "o", q->dtype, OP_SHAPE(args.num_tokens, args.num_heads, args.value_dim));
    if (!args.o) return OP_NO_MEMORY;
    /* Rows past the last query are not the op's to write: in the file they are zeros. */
    int64_t row_bytes = (int64_t)args.num_heads * args.value_dim * epmoe_dtype_size(args.dtype);
    const int32_t *start = op_tensor(context, "query_start")->host;
    int32_t end = start[args.num_seqs];
    EPMOEI_CHECK(check_attention_data(context, &args));
    EPMOEI_CHECK(epmoe_attention_workspace_size(&args, &args.workspace_bytes));
    if (args.workspace_bytes) args.workspace = op_scratch(context, args.workspace_bytes);
    EPMOEI_CHECK(epmoe_attention(&args, NULL));
    if (args.num_tokens == 0 || end >= args.num_tokens) return EPMOE_OK;
    return epmoei_memory_set(args.backend, (char *)args.o + end * row_bytes, 0, (args.num_tokens - end) * row_bytes,
                             NULL);
}

/* --------------------------------------------------------------------------------------------------------- sample */

const op_tensor_t op_sample_tensors[] = {
    {.name = "logits", .shape = "B,V", .kind = OP_FLOAT},
    {.name = "uniform", .shape = "B", .kind = OP_F32},
    {0},
};
const op_key_t op_sample_keys[] = {
    {.name = "temperature", .kind = OP_NATURAL, .initial = "1"},
    {.name = "top_k", .kind = OP_LIMIT, .initial = "0"},
    {.name = "top_p", .kind = OP_POSITIVE, .initial = "1"},
    {.name = "min_p", .kind = OP_NATURAL, .initial = "0"},
    {0},
};

epmoe_status_t op_sample_run(op_context_t *context)
{
    const op_value_t *logits = op_tensor(context, "logits");
    epmoe_sample_args_t args = EPMOE_SAMPLE_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_rows = op_dim(context, 'B');
    args.vocab_size = op_dim(context, 'V');
    args.logits_dtype = logits->dtype;
    args.logits = logits->data;
    args.uniform = op_tensor(context, "uniform")->data;
    args.temperature = op_real(context, "temperature");
    args.top_k = op_number(context, "top_k");
    args.top_p = op_real(context, "top_p");
    args.min_p = op_real(context, "min_p");
    args.tokens = op_output(context, "token", EPMOE_I32, OP_SHAPE(args.num_rows));
    if (!args.tokens) return OP_NO_MEMORY;
    if (args.backend == EPMOE_BACKEND_CUDA) {
        epmoe_sample_args_t checked;
        EPMOEI_CHECK(epmoei_sample_check(&args, &checked));
        checked.uniform = op_tensor(context, "uniform")->host;
        EPMOEI_CHECK(epmoei_sample_check_data(&checked));
    }
    return epmoe_sample(&args, NULL);
}

/* ---------------------------------------------------------------------------------------------------- spec_verify */

const op_tensor_t op_spec_verify_tensors[] = {
    {.name = "draft_ids", .shape = "B,G", .kind = OP_INDEX},
    {.name = "draft_probs", .shape = "B,G,V", .kind = OP_AS_F32},
    {.name = "target_probs", .shape = "B,P,V", .kind = OP_AS_F32},
    {.name = "uniform", .shape = "B,P", .kind = OP_F32},
    {0},
};
const op_key_t op_spec_verify_keys[] = {{0}};

epmoe_status_t op_spec_verify_run(op_context_t *context)
{
    epmoe_spec_verify_args_t args = EPMOE_SPEC_VERIFY_ARGS_INIT;
    int32_t places = op_dim(context, 'P');
    args.backend = op_backend(context);
    args.num_rows = op_dim(context, 'B');
    args.num_drafts = op_dim(context, 'G');
    args.vocab_size = op_dim(context, 'V');
    args.draft_ids = op_tensor(context, "draft_ids")->data;
    args.draft_probs = op_tensor(context, "draft_probs")->data;
    args.target_probs = op_tensor(context, "target_probs")->data;
    args.uniform = op_tensor(context, "uniform")->data;
    if (places != (int64_t)args.num_drafts + 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor 'target_probs' has %d places: expected %lld, one more "
                           "than there are drafts",
                           places, (long long)args.num_drafts + 1);
    args.tokens = op_output(context, "tokens", EPMOE_I32, OP_SHAPE(args.num_rows, places));
    args.accepted = op_output(context, "accepted", EPMOE_I32, OP_SHAPE(args.num_rows));
    return args.tokens && args.accepted ? epmoe_spec_verify(&args, NULL) : OP_NO_MEMORY;
}
