#include "tools/tool_check.h"

#include "base/dtype.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "layers.I.rest": the rest, and I; NULL for any other name. */
static const char *layer_part(const char *name, int32_t *layer)
{
    static const char prefix[] = "layers.";
    if (strncmp(name, prefix, sizeof prefix - 1)) return NULL;
    const char *digits = name + sizeof prefix - 1;
    size_t count = strspn(digits, "0123456789");
    if (count < 1 || count > 8 || digits[count] != '.') return NULL;
    *layer = atoi(digits);
    return digits + count + 1;
}

static golden_layer_t *layer_entry(golden_t *golden, int32_t layer)
{
    for (int32_t i = 0; i < golden->num_layers; i++)
        if (golden->layers[i].layer == layer) return &golden->layers[i];
    golden_layer_t *entry = &golden->layers[golden->num_layers++];
    *entry = (golden_layer_t){.layer = layer};
    return entry;
}

static void note_tensor(golden_layer_t *entry, const char *part, const epmoei_tensor_t *tensor)
{
    if (!strcmp(part, "moe.in")) entry->in = tensor;
    if (!strcmp(part, "router.in") && !entry->in) entry->in = tensor; /* the same values: moe.in is preferred */
    if (!strcmp(part, "moe.out0")) entry->out = tensor;
    if (!strcmp(part, "router.out0")) entry->logits = tensor;
    if (!strcmp(part, "router.out1")) entry->weights = tensor;
    if (!strcmp(part, "router.out2")) entry->ids = tensor;
    if (!strcmp(part, "in")) entry->layer_in = tensor;
    if (!strcmp(part, "out0")) entry->layer_out = tensor;
}

void golden_note_unchecked(golden_t *golden, const char *what)
{
    if (strstr(golden->unchecked, what)) return;
    size_t used = strlen(golden->unchecked);
    snprintf(golden->unchecked + used, sizeof golden->unchecked - used, "%s%s", used ? ", " : "", what);
}

static int by_layer(const void *a, const void *b)
{
    return ((const golden_layer_t *)a)->layer - ((const golden_layer_t *)b)->layer;
}

epmoe_status_t golden_open(const char *path, int32_t only, golden_t *golden)
{
    *golden = (golden_t){0};
    EPMOEI_CHECK(epmoei_safetensors_open(path, &golden->file));
    int64_t count = epmoei_safetensors_count(golden->file);
    golden->layers = calloc((size_t)count + 1, sizeof *golden->layers);
    if (!golden->layers) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the names of %s", path);
    /* Two passes: moe.in takes precedence over router.in, whichever comes first. */
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < count; i++) {
            const epmoei_tensor_t *tensor = epmoei_safetensors_at(golden->file, i);
            int32_t layer;
            const char *part = layer_part(tensor->name, &layer);
            if (!part) {
                if (!strcmp(tensor->name, "logits") && only < 0) golden->logits = tensor;
                continue;
            }
            if (only >= 0 && layer != only) continue;
            if (!strcmp(part, "router.in") == (pass == 1)) note_tensor(layer_entry(golden, layer), part, tensor);
        }
    int32_t kept = 0;
    for (int32_t i = 0; i < golden->num_layers; i++) {
        golden_layer_t *entry = &golden->layers[i];
        bool moe = entry->in && (entry->out || entry->logits || entry->ids); /* weights are compared by id */
        bool whole = entry->layer_in && entry->layer_out;
        if (entry->layer_out && entry->layer >= golden->last_layer) {
            golden->last_out = entry->layer_out;
            golden->last_layer = entry->layer;
        }
        if (!moe && (entry->in || entry->out || entry->logits || entry->weights || entry->ids)) {
            golden_note_unchecked(golden, "layers with an input or an output alone");
            entry->in = NULL;
        }
        if (moe || whole) golden->layers[kept++] = *entry;
    }
    golden->num_layers = kept;
    qsort(golden->layers, (size_t)kept, sizeof *golden->layers, by_layer);
    if (kept || (golden->logits && golden->last_out)) return EPMOE_OK;
    if (only >= 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "%s holds nothing to check of layer %d: expected layers.%d.moe.in and layers.%d.moe.out0",
                           path, only, only, only);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                       "%s holds nothing to check: expected layers.I.moe.in and layers.I.moe.out0", path);
}

void golden_close(golden_t *golden)
{
    free(golden->layers);
    epmoei_safetensors_close(golden->file);
    *golden = (golden_t){0};
}

/* All leading dimensions together are the rows. */
static epmoe_status_t check_matrix(const epmoei_tensor_t *tensor, int64_t rows, int64_t cols)
{
    int64_t last = tensor->num_dims ? tensor->shape[tensor->num_dims - 1] : 1;
    if (last == cols && (rows < 0 || tensor->num_elements == rows * cols)) return EPMOE_OK;
    char got[160] = "", expected[24] = "T";
    size_t used = 0;
    for (int32_t i = 0; i < tensor->num_dims && used < sizeof got; i++)
        used += (size_t)snprintf(got + used, sizeof got - used, "%s%lld", i ? "," : "", (long long)tensor->shape[i]);
    if (rows >= 0) snprintf(expected, sizeof expected, "%lld", (long long)rows);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has shape [%s]: expected [%s,%lld]", tensor->name,
                       got, expected, (long long)cols);
}

epmoe_status_t golden_read_rows(const epmoei_tensor_t *tensor, int64_t rows, int64_t cols, float **values)
{
    if (!tensor) return EPMOE_OK;
    EPMOEI_CHECK(check_matrix(tensor, rows, cols));
    if (!epmoei_dtype_is_float(tensor->dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has dtype %s: expected F32, BF16 or F16",
                           tensor->name, tensor->dtype_name);
    EPMOEI_CHECK(epmoei_alloc_for((void **)values, tensor->num_elements * 4, tensor->name));
    if (tensor->num_elements) epmoei_to_f32(*values, tensor->data, tensor->dtype, tensor->num_elements);
    return EPMOE_OK;
}

static int64_t index_at(const epmoei_tensor_t *tensor, int64_t i)
{
    int32_t narrow;
    int64_t wide;
    if (tensor->dtype == EPMOE_I32) {
        memcpy(&narrow, (const char *)tensor->data + 4 * i, 4);
        return narrow;
    }
    memcpy(&wide, (const char *)tensor->data + 8 * i, 8);
    return wide;
}

static epmoe_status_t read_ids(const epmoei_tensor_t *tensor, int64_t rows, int64_t cols, int32_t num_experts,
                               int32_t **values)
{
    if (!tensor) return EPMOE_OK;
    EPMOEI_CHECK(check_matrix(tensor, rows, cols));
    if (tensor->dtype != EPMOE_I32 && tensor->dtype != EPMOE_I64)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has dtype %s: expected I32 or I64", tensor->name,
                           tensor->dtype_name);
    EPMOEI_CHECK(epmoei_alloc_for((void **)values, tensor->num_elements * 4, tensor->name));
    for (int64_t i = 0; i < tensor->num_elements; i++) {
        int64_t id = index_at(tensor, i);
        if (id < 0 || id >= num_experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s', element %lld is %lld: expected 0 to %d",
                               tensor->name, (long long)i, (long long)id, num_experts - 1);
        (*values)[i] = (int32_t)id;
    }
    return EPMOE_OK;
}

epmoe_status_t golden_read(const golden_layer_t *layer, const epmoe_layer_config_t *config, golden_values_t *values)
{
    *values = (golden_values_t){0};
    EPMOEI_CHECK(check_matrix(layer->in, -1, config->hidden));
    int64_t rows = layer->in->num_elements / config->hidden;
    if (rows < 1 || rows > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has %lld rows: expected 1 to %d", layer->in->name,
                           (long long)rows, INT32_MAX);
    values->num_tokens = (int32_t)rows;
    epmoe_status_t status;
    EPMOEI_CHECK_GOTO(golden_read_rows(layer->in, rows, config->hidden, &values->in), fail);
    EPMOEI_CHECK_GOTO(golden_read_rows(layer->out, rows, config->hidden, &values->out), fail);
    if (config->num_experts) {
        EPMOEI_CHECK_GOTO(golden_read_rows(layer->logits, rows, config->num_experts, &values->logits), fail);
        EPMOEI_CHECK_GOTO(golden_read_rows(layer->weights, rows, config->top_k, &values->weights), fail);
        EPMOEI_CHECK_GOTO(read_ids(layer->ids, rows, config->top_k, config->num_experts, &values->ids), fail);
    }
    return EPMOE_OK;
fail:
    golden_values_free(values);
    return status;
}

void golden_values_free(golden_values_t *values)
{
    epmoei_free(values->in);
    epmoei_free(values->out);
    epmoei_free(values->logits);
    epmoei_free(values->weights);
    epmoei_free(values->ids);
    *values = (golden_values_t){0};
}
