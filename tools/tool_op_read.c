#include "tools/tool_op_read.h"

#include "base/dtype.h"
#include "tools/tool_util.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------------- keys */

int32_t op_find_key(const op_t *op, const char *name, size_t length)
{
    for (int32_t i = 0; op->keys[i].name; i++)
        if (strlen(op->keys[i].name) == length && !memcmp(op->keys[i].name, name, length)) return i;
    return -1;
}

static epmoe_status_t unknown_key(const op_t *op, const char *setting, size_t length)
{
    char known[256] = "";
    size_t used = 0;
    for (int32_t i = 0; op->keys[i].name && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", op->keys[i].name);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "key '%.*s' is unknown to op %s: expected %s", (int)length,
                       setting, op->name, used ? known : "none");
}

static epmoe_status_t parse_value(const op_key_t *key, const char *text, double *value)
{
    int64_t number;
    switch (key->kind) {
    case OP_COUNT:
        if (!tool_number(text, 1, INT32_MAX, &number))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected a whole number from 1 to %d",
                               key->name, text, INT32_MAX);
        *value = (double)number;
        return EPMOE_OK;
    case OP_GROUP:
        if (!tool_number(text, -1, INT32_MAX, &number) || number == 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected a whole number from 1, or -1",
                               key->name, text);
        *value = (double)number;
        return EPMOE_OK;
    case OP_LIMIT:
        if (!tool_number(text, -1, INT32_MAX, &number))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected a whole number from -1 to %d",
                               key->name, text, INT32_MAX);
        *value = (double)number;
        return EPMOE_OK;
    case OP_NATURAL:
        if (!tool_real(text, value) || !(*value >= 0 && *value <= (double)FLT_MAX))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected a finite number from 0 on",
                               key->name, text);
        return EPMOE_OK;
    case OP_REAL:
    case OP_POSITIVE:
        /* As a float: what underflows to 0 or overflows there is refused too. */
        if (!tool_real(text, value) || (float)*value == 0 || epmoei_f32_bits((float)*value) << 1 == 0xFF000000u ||
            (key->kind == OP_POSITIVE && *value < 0))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected a finite number %s", key->name, text,
                               key->kind == OP_POSITIVE ? "above 0" : "other than 0");
        return EPMOE_OK;
    case OP_CHOICE:
        number = tool_choice(key->choices, text);
        if (number < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is '%s': expected one of %s", key->name, text,
                               key->choices);
        *value = (double)number;
        return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_INTERNAL, "key %s has no kind", key->name);
}

static epmoe_status_t store_key(op_context_t *context, int32_t i, const char *text)
{
    const op_key_t *key = &context->op->keys[i];
    EPMOEI_CHECK(parse_value(key, text, &context->keys[i]));
    context->given[i] = true;
    if (key->dim) context->dims[(unsigned char)key->dim] = (int64_t)context->keys[i];
    return EPMOE_OK;
}

epmoe_status_t op_set_key(op_context_t *context, const char *setting)
{
    size_t length = strcspn(setting, "=");
    if (!setting[length]) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "setting '%s': expected key=value", setting);
    int32_t i = op_find_key(context->op, setting, length);
    if (i < 0) return unknown_key(context->op, setting, length);
    if (context->given[i])
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "key '%s' is given twice", context->op->keys[i].name);
    return store_key(context, i, setting + length + 1);
}

epmoe_status_t op_finish_keys(op_context_t *context)
{
    const op_key_t *keys = context->op->keys;
    for (int32_t i = 0; keys[i].name; i++) {
        if (context->given[i]) continue;
        if (keys[i].required)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "key '%s' is missing: op %s needs --set %s=...",
                               keys[i].name, context->op->name, keys[i].name);
        if (keys[i].initial) EPMOEI_CHECK(store_key(context, i, keys[i].initial));
    }
    return EPMOE_OK;
}

/* ------------------------------------------------------------------------------------------------------- tensors */

int32_t op_find_tensor(const op_t *op, const char *name)
{
    for (int32_t i = 0; op->tensors[i].name; i++) {
        const op_tensor_t *spec = &op->tensors[i];
        if (!strcmp(spec->name, name) || (spec->alias && !strcmp(spec->alias, name))) return i;
    }
    return -1;
}

static void list_tensors(const op_t *op, char *text, size_t size)
{
    size_t used = 0;
    for (int32_t i = 0; op->tensors[i].name && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s", i ? ", " : "", op->tensors[i].name,
                                 op->tensors[i].optional ? " (optional)" : "");
}

/* One dimension of a shape list: "2f" has factor 2 and letter f. */
typedef struct dim_spec_t {
    int32_t factor;
    unsigned char letter;
} dim_spec_t;

static int32_t parse_shape(const char *shape, dim_spec_t *dims)
{
    int32_t count = 0;
    for (;; shape++) {
        dims[count].factor = *shape >= '2' && *shape <= '9' ? *shape++ - '0' : 1;
        dims[count++].letter = (unsigned char)*shape++;
        if (*shape != ',') return count;
    }
}

static epmoe_status_t wrong_shape(const op_context_t *context, const epmoei_tensor_t *tensor, const dim_spec_t *dims,
                                  int32_t count)
{
    char got[160] = "", expected[160] = "";
    size_t used = 0;
    for (int32_t i = 0; i < tensor->num_dims && used < sizeof got; i++)
        used += (size_t)snprintf(got + used, sizeof got - used, "%s%lld", i ? "," : "", (long long)tensor->shape[i]);
    used = 0;
    for (int32_t i = 0; i < count && used < sizeof expected; i++) {
        char factor[2] = {dims[i].factor > 1 ? (char)('0' + dims[i].factor) : 0, 0};
        used +=
            (size_t)snprintf(expected + used, sizeof expected - used, "%s%s%c", i ? "," : "", factor, dims[i].letter);
        int64_t size = context->dims[dims[i].letter];
        if (size >= 0 && dims[i].letter != '1' && used < sizeof expected)
            used +=
                (size_t)snprintf(expected + used, sizeof expected - used, "=%lld", (long long)size * dims[i].factor);
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has shape [%s]: expected [%s]", tensor->name, got,
                       expected);
}

/* Compares with the sizes that are known and learns the others. */
static epmoe_status_t match_shape(op_context_t *context, const char *shape, const epmoei_tensor_t *tensor)
{
    dim_spec_t dims[EPMOEI_MAX_DIMS];
    int32_t count = parse_shape(shape, dims);
    bool ok = tensor->num_dims == count;
    for (int32_t i = 0; i < count && ok; i++) {
        int64_t size = tensor->shape[i], known = context->dims[dims[i].letter];
        ok = size % dims[i].factor == 0 && size <= INT32_MAX && (known < 0 || size == known * dims[i].factor);
    }
    if (!ok) return wrong_shape(context, tensor, dims, count);
    for (int32_t i = 0; i < count; i++) context->dims[dims[i].letter] = tensor->shape[i] / dims[i].factor;
    return EPMOE_OK;
}

static epmoe_status_t check_dtype(op_kind_t kind, const epmoei_tensor_t *tensor)
{
    bool ok = false;
    const char *expected = "";
    switch (kind) {
    case OP_FLOAT:
    case OP_AS_F32:
        ok = epmoei_dtype_is_float(tensor->dtype);
        expected = "F32, BF16 or F16";
        break;
    case OP_F32:
        ok = tensor->dtype == EPMOE_F32;
        expected = "F32";
        break;
    case OP_INDEX:
    case OP_WIDE:
        ok = tensor->dtype == EPMOE_I32 || tensor->dtype == EPMOE_I64;
        expected = "I32 or I64";
        break;
    case OP_NUMBERS:
        ok = epmoei_dtype_is_float(tensor->dtype) || tensor->dtype == EPMOE_F8_E4M3;
        expected = "F32, BF16, F16 or F8_E4M3";
        break;
    case OP_STORED:
        ok = tensor->dtype != EPMOE_DTYPE_NONE;
        expected = "F32, BF16, F16, F8_E4M3, F8_E8M0, U8, I32 or I64";
        break;
    }
    if (ok) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has dtype %s: expected %s", tensor->name,
                       tensor->dtype_name, expected);
}

static epmoe_status_t copy_index(int32_t *dst, const epmoei_tensor_t *tensor)
{
    for (int64_t i = 0; i < tensor->num_elements; i++) {
        int64_t value;
        memcpy(&value, (const char *)tensor->data + 8 * i, 8);
        if (value < INT32_MIN || value > INT32_MAX)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s', element %lld is %lld: expected 32 bits",
                               tensor->name, (long long)i, (long long)value);
        dst[i] = (int32_t)value;
    }
    return EPMOE_OK;
}

static epmoe_status_t copy_tensor(op_value_t *value, op_kind_t kind, const epmoei_tensor_t *tensor)
{
    value->dtype = kind == OP_AS_F32 ? EPMOE_F32 : kind == OP_INDEX ? EPMOE_I32 : tensor->dtype;
    int64_t bytes = tensor->num_elements * epmoe_dtype_size(value->dtype);
    EPMOEI_CHECK(epmoei_alloc_for(&value->host, bytes, tensor->name));
    value->present = true;
    value->num_dims = tensor->num_dims;
    memcpy(value->shape, tensor->shape, sizeof value->shape);
    if (!tensor->num_elements) return EPMOE_OK;
    if (kind == OP_INDEX && tensor->dtype == EPMOE_I64) return copy_index(value->host, tensor);
    if (kind == OP_AS_F32)
        epmoei_to_f32(value->host, tensor->data, tensor->dtype, tensor->num_elements);
    else
        memcpy(value->host, tensor->data, (size_t)bytes);
    return EPMOE_OK;
}

epmoe_status_t op_read_tensors(op_context_t *context, const epmoei_safetensors_t *file)
{
    const op_t *op = context->op;
    char known[1024];
    list_tensors(op, known, sizeof known);
    const epmoei_tensor_t *found[OP_MAX_TENSORS] = {0};
    for (int64_t i = 0; i < epmoei_safetensors_count(file); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(file, i);
        int32_t place = op_find_tensor(op, tensor->name);
        if (place < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' is unknown to op %s: expected %s",
                               tensor->name, op->name, known);
        if (found[place])
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensors '%s' and '%s' are the same input: expected one",
                               found[place]->name, tensor->name);
        found[place] = tensor;
    }
    for (int32_t i = 0; op->tensors[i].name; i++) {
        if (!found[i]) {
            if (op->tensors[i].optional) continue;
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' is missing: op %s expects %s",
                               op->tensors[i].name, op->name, known);
        }
        EPMOEI_CHECK(check_dtype(op->tensors[i].kind, found[i]));
        if (!op->tensors[i].any_shape && op->tensors[i].kind != OP_STORED)
            EPMOEI_CHECK(match_shape(context, op->tensors[i].shape, found[i]));
        EPMOEI_CHECK(copy_tensor(&context->tensors[i], op->tensors[i].kind, found[i]));
        EPMOEI_CHECK(op_place(context, &context->tensors[i], found[i]->num_elements, found[i]->name));
    }
    return EPMOE_OK;
}
