/* Quantised projections of `moe_tool op`: which tensors each format has, and their dtypes and shapes. */
#include "tools/tool_op_read.h"

#include "base/dtype.h"
#include "kernels/quant_formats.h"

#include <stdio.h>
#include <string.h>

static const epmoe_format_t formats[] = {EPMOE_FORMAT_BF16,      EPMOE_FORMAT_F16,  EPMOE_FORMAT_F32,
                                         EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_AWQ,
                                         EPMOE_FORMAT_CT_W4,     EPMOE_FORMAT_MXFP4}; /* = OP_FORMATS */

epmoe_format_t op_format(const op_context_t *context)
{
    return op_has(context, "format") ? formats[op_number(context, "format")] : EPMOE_FORMAT_NONE;
}

/* The tensors of a format besides `plain`, of FP8 alone the codes themselves. */
static const struct {
    epmoe_format_t format;
    const char *names; /* "a,b": all that may be there */
    const char *data;  /* NULL: `plain` */
} tables[] = {
    {EPMOE_FORMAT_FP8_BLOCK, "weight_scale_inv,weight_scale,scale", NULL},
    {EPMOE_FORMAT_GPTQ, "qweight,qzeros,scales,g_idx", "qweight"},
    {EPMOE_FORMAT_AWQ, "qweight,qzeros,scales", "qweight"},
    {EPMOE_FORMAT_CT_W4, "weight_packed,weight_scale,weight_shape,weight_zero_point,weight_g_idx", "weight_packed"},
    {EPMOE_FORMAT_MXFP4, "blocks,scales", "blocks"},
};
static const char all_names[] = "weight_scale_inv,weight_scale,scale,qweight,qzeros,scales,g_idx,weight_packed,"
                                "weight_shape,weight_zero_point,weight_g_idx,blocks";

/* The next name of a list, which moves on; false at the end. */
static bool next_name(const char **list, char name[32])
{
    size_t length = strcspn(*list, ",");
    if (length == 0) return false;
    snprintf(name, 32, "%.*s", (int)length, *list);
    *list += length + ((*list)[length] == ',');
    return true;
}

static bool is_listed(const char *list, const char *name)
{
    char entry[32];
    while (next_name(&list, entry))
        if (!strcmp(entry, name)) return true;
    return false;
}

static const op_value_t *find(const op_context_t *context, const op_projection_t *projection, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "%s%s", projection->prefix, name);
    const op_value_t *value = op_tensor(context, full);
    return value->present ? value : NULL;
}

static epmoe_status_t missing(const op_projection_t *projection, const char *name, epmoe_format_t format)
{
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s%s' is missing: format %s needs it", projection->prefix,
                       name, epmoe_format_string(format));
}

/* Nothing may lie beside a weight that the format does not read. */
static epmoe_status_t refuse_others(const op_context_t *context, const op_projection_t *projection,
                                    epmoe_format_t format, const char *names)
{
    const char *list = all_names;
    char name[32];
    while (next_name(&list, name))
        if (find(context, projection, name) && !is_listed(names, name))
            return epmoei_fail(
                EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s%s' is none of format %s%s%s", projection->prefix, name,
                format == EPMOE_FORMAT_NONE ? "bf16, fp16 and fp32: set format" : epmoe_format_string(format),
                *names ? ": expected " : "", names);
    return EPMOE_OK;
}

/* One tensor with the dtypes it may have, behind the experts' dimension the given ones; < 0 = any. */
static epmoe_status_t check_tensor(const op_projection_t *projection, const char *name, const op_value_t *value,
                                   bool dtype_ok, const char *dtypes, int32_t num_dims, const int64_t *dims)
{
    if (!dtype_ok)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s%s' has dtype %s: expected %s", projection->prefix,
                           name, epmoe_dtype_string(value->dtype), dtypes);
    int32_t lead = projection->stacked;
    bool same = value->num_dims == num_dims + lead &&
                (!lead || projection->experts < 0 || value->shape[0] == projection->experts);
    for (int32_t i = 0; same && i < num_dims; i++) same = dims[i] < 0 || value->shape[i + lead] == dims[i];
    if (same) return EPMOE_OK;
    char have[96] = "", want[96] = "";
    size_t used = 0;
    for (int32_t i = 0; i < value->num_dims && used < sizeof have; i++)
        used += (size_t)snprintf(have + used, sizeof have - used, "%s%lld", i ? "," : "", (long long)value->shape[i]);
    used = 0;
    for (int32_t i = -lead; i < num_dims && used < sizeof want; i++) {
        int64_t size = i < 0 ? projection->experts : dims[i];
        if (i > -lead) used += (size_t)snprintf(want + used, sizeof want - used, ",");
        if (used < sizeof want)
            used += (size_t)(size < 0 ? snprintf(want + used, sizeof want - used, "*")
                                      : snprintf(want + used, sizeof want - used, "%lld", (long long)size));
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s%s' has shape [%s]: expected [%s]", projection->prefix,
                       name, have, want);
}

/* Element i of weight_shape, I64 or I32. */
static int64_t size_at(const op_value_t *value, int64_t i)
{
    return value->dtype == EPMOE_I64 ? ((const int64_t *)value->host)[i] : ((const int32_t *)value->host)[i];
}

/* What weight_shape says, for each expert the same. */
static epmoe_status_t check_weight_shape(const op_projection_t *projection, const op_value_t *value)
{
    const int64_t two = 2, want[] = {projection->rows, projection->cols};
    EPMOEI_CHECK(check_tensor(projection, "weight_shape", value, value->dtype == EPMOE_I64 || value->dtype == EPMOE_I32,
                              "I64 or I32", 1, &two));
    for (int64_t i = 0; i < 2 * (projection->stacked ? projection->experts : 1); i++) {
        int64_t have = size_at(value, i);
        if (have != want[i % 2])
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%sweight_shape' holds %lld: expected [%lld,%lld]",
                               projection->prefix, (long long)have, (long long)want[0], (long long)want[1]);
    }
    return EPMOE_OK;
}

/* Sizes that the caller does not know, from the tensors that tell them. */
static void learn_sizes(const op_context_t *context, op_projection_t *projection, epmoe_format_t format,
                        const op_value_t *data)
{
    int32_t lead = projection->stacked;
    int64_t d0 = data->shape[lead], d1 = data->shape[lead + 1];
    const op_value_t *scales = find(context, projection, "scales"), *g_idx = find(context, projection, "g_idx"),
                     *shape = find(context, projection, "weight_shape");
    int64_t rows = d0, cols = d1;
    switch (format) {
    case EPMOE_FORMAT_GPTQ:
        rows = d1;
        cols = g_idx && g_idx->num_dims == 1 + lead ? g_idx->shape[lead] : 8 * d0;
        break;
    case EPMOE_FORMAT_AWQ:
        rows = scales && scales->num_dims == 2 + lead ? scales->shape[lead + 1] : 8 * d1;
        cols = d0;
        break;
    case EPMOE_FORMAT_CT_W4:
        cols = 8 * d1;
        if (shape && (shape->dtype == EPMOE_I64 || shape->dtype == EPMOE_I32) && shape->num_dims == 1 + lead &&
            shape->shape[lead] == 2 && (!lead || shape->shape[0] > 0))
            cols = size_at(shape, 1);
        break;
    case EPMOE_FORMAT_MXFP4: cols = EPMOEI_MXFP4_GROUP * d1; break;
    default: break;
    }
    if (projection->rows < 0) projection->rows = rows;
    if (projection->cols < 0) projection->cols = cols;
}

static epmoe_status_t check_data(const op_projection_t *projection, epmoe_format_t format, const char *name,
                                 const op_value_t *data)
{
    int64_t n = projection->rows, k = projection->cols, n8 = epmoei_ceil_div(n, 8), k8 = epmoei_ceil_div(k, 8);
    bool words = data->dtype == EPMOE_I32;
    switch (format) {
    case EPMOE_FORMAT_GPTQ: return check_tensor(projection, name, data, words, "I32", 2, (const int64_t[]){k8, n});
    case EPMOE_FORMAT_AWQ: return check_tensor(projection, name, data, words, "I32", 2, (const int64_t[]){k, n8});
    case EPMOE_FORMAT_CT_W4: return check_tensor(projection, name, data, words, "I32", 2, (const int64_t[]){n, k8});
    case EPMOE_FORMAT_MXFP4:
        if (k % EPMOEI_MXFP4_GROUP)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "format is mxfp4 with %lld columns: expected a multiple of "
                               "%d",
                               (long long)k, EPMOEI_MXFP4_GROUP);
        return check_tensor(projection, name, data, data->dtype == EPMOE_U8, "U8", 3,
                            (const int64_t[]){n, k / EPMOEI_MXFP4_GROUP, EPMOEI_MXFP4_GROUP / 2});
    default:
        /* The plain tensor's shape is that of the op's table. */
        if (data->dtype == EPMOE_F8_E4M3) return EPMOE_OK;
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor '%s' is stored as %s: expected fp8_block, as format "
                           "says",
                           projection->plain, epmoe_format_string(epmoei_format_of_dtype(data->dtype)));
    }
}

static epmoe_status_t take_scales(const op_context_t *context, op_projection_t *projection, epmoe_weight_t *weight)
{
    const char *name = "scales";
    const op_value_t *value = NULL;
    int64_t n = projection->rows, k = projection->cols, group = weight->group_size;
    int64_t groups = epmoei_ceil_div(k, group), dims[2] = {groups, n};
    if (weight->format == EPMOE_FORMAT_FP8_BLOCK) {
        static const char *const spellings[] = {"weight_scale_inv", "weight_scale", "scale"};
        for (int i = 0; i < 3; i++) {
            const op_value_t *found = find(context, projection, spellings[i]);
            if (found && value)
                return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                                   "tensors '%s%s' and '%s%s' are the same input: "
                                   "expected one",
                                   projection->prefix, name, projection->prefix, spellings[i]);
            if (found) value = found, name = spellings[i];
        }
        if (!value) return missing(projection, "weight_scale_inv", weight->format);
        dims[0] = epmoei_ceil_div(n, group), dims[1] = groups;
        int64_t halves = 2 * epmoei_ceil_div(n / 2, group);
        int32_t lead = projection->stacked;
        if (lead && n % 2 == 0 && halves != dims[0] && value->num_dims == 3 && value->shape[1] == halves) {
            /* There PACKED rows alternate. */
            if (op_backend(context) == EPMOE_BACKEND_CUDA)
                return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                                   "tensor '%s%s' has %lld blocks of rows, of gate and up rows apart: on CUDA expected "
                                   "%lld",
                                   projection->prefix, name, (long long)halves, (long long)dims[0]);
            dims[0] = halves;
            projection->layout = EPMOE_LAYOUT_PACKED;
        }
    } else {
        if (weight->format == EPMOE_FORMAT_CT_W4) name = "weight_scale";
        if (weight->format == EPMOE_FORMAT_CT_W4 || weight->format == EPMOE_FORMAT_MXFP4) dims[0] = n, dims[1] = groups;
        value = find(context, projection, name);
        if (!value) return missing(projection, name, weight->format);
    }
    bool bytes = value->dtype == EPMOE_U8 || value->dtype == EPMOE_F8_E8M0;
    if (weight->format == EPMOE_FORMAT_MXFP4)
        EPMOEI_CHECK(check_tensor(projection, name, value, bytes, "U8", 2, dims));
    else
        EPMOEI_CHECK(check_tensor(projection, name, value, epmoei_is_scales_dtype(value->dtype),
                                  "F32, BF16, F16 or F8_E8M0", 2, dims));
    weight->scales = value->data;
    weight->scales_dtype = bytes ? EPMOE_F8_E8M0 : value->dtype;
    return EPMOE_OK;
}

static epmoe_status_t take_zeros(const op_context_t *context, const op_projection_t *projection, epmoe_weight_t *weight)
{
    int64_t n8 = epmoei_ceil_div(projection->rows, 8), groups = epmoei_ceil_div(projection->cols, weight->group_size);
    bool ct = weight->format == EPMOE_FORMAT_CT_W4;
    const char *name = ct ? "weight_zero_point" : "qzeros", *index = ct ? "weight_g_idx" : "g_idx";
    const op_value_t *zeros = find(context, projection, name), *g_idx = find(context, projection, index);
    if (!zeros && !ct) return missing(projection, name, weight->format);
    if (zeros) {
        EPMOEI_CHECK(check_tensor(projection, name, zeros, zeros->dtype == EPMOE_I32, "I32", 2,
                                  (const int64_t[]){ct ? n8 : groups, ct ? groups : n8}));
        weight->zeros = zeros->data;
    }
    if (g_idx) {
        EPMOEI_CHECK(check_tensor(projection, index, g_idx, g_idx->dtype == EPMOE_I32, "I32", 1, &projection->cols));
        weight->g_idx = g_idx->data;
    }
    return EPMOE_OK;
}

static epmoe_status_t take_quantised(const op_context_t *context, op_projection_t *projection, epmoe_weight_t *weight)
{
    size_t i = 0;
    while (tables[i].format != weight->format) i++;
    const op_value_t *plain = op_tensor(context, projection->plain);
    const char *name = tables[i].data;
    const op_value_t *data = name ? find(context, projection, name) : plain->present ? plain : NULL;
    EPMOEI_CHECK(refuse_others(context, projection, weight->format, tables[i].names));
    if (!data)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s%s' is missing: format %s needs it",
                           name ? projection->prefix : "", name ? name : projection->plain,
                           epmoe_format_string(weight->format));
    if (name && plain->present)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' is a plain weight: format %s has none",
                           projection->plain, epmoe_format_string(weight->format));
    if (name) {
        static const int64_t any[] = {-1, -1, -1};
        EPMOEI_CHECK(check_tensor(projection, name, data, true, "", weight->format == EPMOE_FORMAT_MXFP4 ? 3 : 2, any));
    }
    if (projection->stacked && projection->experts < 0) projection->experts = data->shape[0];
    learn_sizes(context, projection, weight->format, data);
    if (projection->rows < 1 || projection->cols < 1 || projection->rows > INT32_MAX || projection->cols > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor '%s%s' is of a projection [%lld,%lld]: expected sizes "
                           "from 1 to %d",
                           projection->prefix, name ? name : projection->plain, (long long)projection->rows,
                           (long long)projection->cols, INT32_MAX);
    EPMOEI_CHECK(check_data(projection, weight->format, name, data));
    weight->data = data->data;
    weight->group_size = weight->format == EPMOE_FORMAT_MXFP4 ? 0 : op_number(context, "group");
    weight->zero_convention = op_number(context, "zero_convention") + 1;
    /* Fills in the group that -1 and MXFP4 stand for. */
    EPMOEI_CHECK(epmoei_quant_check_weight(weight, projection->plain, projection->cols));
    EPMOEI_CHECK(take_scales(context, projection, weight));
    if (weight->format == EPMOE_FORMAT_FP8_BLOCK || weight->format == EPMOE_FORMAT_MXFP4) return EPMOE_OK;
    EPMOEI_CHECK(take_zeros(context, projection, weight));
    const op_value_t *shape = weight->format == EPMOE_FORMAT_CT_W4 ? find(context, projection, "weight_shape") : NULL;
    return shape ? check_weight_shape(projection, shape) : EPMOE_OK;
}

static epmoe_status_t take_plain(const op_context_t *context, op_projection_t *projection, epmoe_weight_t *weight)
{
    const op_value_t *tensor = op_tensor(context, projection->plain);
    EPMOEI_CHECK(refuse_others(context, projection, EPMOE_FORMAT_NONE, ""));
    if (!tensor->present)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor '%s' is missing: op %s expects it, or the tensors of "
                           "another format",
                           projection->plain, context->op->name);
    if (tensor->dtype == EPMOE_F8_E4M3 && weight->format == EPMOE_FORMAT_NONE)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' is stored as f8_e4m3: expected format=fp8_block",
                           projection->plain);
    epmoe_format_t stored = epmoei_format_of_dtype(tensor->dtype);
    if (tensor->dtype == EPMOE_F8_E4M3) stored = EPMOE_FORMAT_FP8_BLOCK;
    if (weight->format != EPMOE_FORMAT_NONE && weight->format != stored)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' is stored as %s: expected %s, as format says",
                           projection->plain, epmoe_format_string(stored), epmoe_format_string(weight->format));
    int32_t lead = projection->stacked;
    if (lead) projection->experts = tensor->shape[0];
    projection->rows = tensor->shape[lead];
    projection->cols = tensor->shape[lead + 1];
    weight->format = stored;
    weight->data = tensor->data;
    return EPMOE_OK;
}

epmoe_status_t op_take_projection(const op_context_t *context, op_projection_t *projection, epmoe_weight_t *weight)
{
    *weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    weight->format = op_format(context);
    projection->layout = EPMOE_LAYOUT_GATE_FIRST;
    return epmoei_format_is_quantised(weight->format) ? take_quantised(context, projection, weight)
                                                      : take_plain(context, projection, weight);
}
