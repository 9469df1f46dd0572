#include "base/device.h"
#include "tools/tool_op_read.h"

#include <string.h>

/* Everything of an op runs on the default stream. */
#define STREAM NULL

void op_context_init(op_context_t *context, const op_t *op, epmoe_backend_t backend)
{
    *context = (op_context_t){.op = op, .backend = backend};
    for (size_t i = 0; i < sizeof context->dims / sizeof context->dims[0]; i++) context->dims[i] = -1;
    context->dims['1'] = 1;
}

void op_context_free(op_context_t *context)
{
    for (int32_t i = 0; i < OP_MAX_TENSORS; i++) {
        epmoei_memory_free(context->backend, context->tensors[i].data);
        epmoei_free(context->tensors[i].host);
        epmoei_memory_free(context->backend, context->output_data[i]);
        epmoei_free(context->output_host[i]);
    }
    for (int32_t i = 0; i < OP_MAX_SCRATCH; i++) epmoei_memory_free(context->backend, context->scratch[i]);
    epmoei_free(context->host_scratch);
}

epmoe_status_t op_place(op_context_t *context, op_value_t *value, int64_t num_elements, const char *what)
{
    int64_t bytes = num_elements * epmoe_dtype_size(value->dtype);
    EPMOEI_CHECK(epmoei_memory_alloc(context->backend, &value->data, bytes, what));
    return epmoei_memory_copy(context->backend, value->data, value->host, bytes, STREAM);
}

static int64_t output_bytes(const safetensors_output_t *output)
{
    int64_t bytes = epmoe_dtype_size(output->dtype);
    for (int32_t i = 0; i < output->num_dims; i++)
        if (__builtin_mul_overflow(bytes, output->shape[i], &bytes)) return -1;
    return bytes;
}

static epmoe_status_t bring_home(op_context_t *context, int32_t i)
{
    safetensors_output_t *output = &context->outputs[i];
    int64_t bytes = output_bytes(output);
    EPMOEI_CHECK(epmoei_alloc_for(&context->output_host[i], bytes, output->name));
    EPMOEI_CHECK(epmoei_memory_copy(context->backend, context->output_host[i], context->output_data[i], bytes, STREAM));
    output->data = context->output_host[i];
    return EPMOE_OK;
}

epmoe_status_t op_finish(op_context_t *context)
{
    EPMOEI_CHECK(epmoei_stream_wait(context->backend, STREAM));
    epmoe_status_t found = context->backend == EPMOE_BACKEND_CUDA ? epmoei_error_word_check() : EPMOE_OK;
    if (found != EPMOE_OK) return epmoei_fail_context(found, "op %s", context->op->name);
    for (int32_t i = 0; i < context->num_outputs; i++) EPMOEI_CHECK(bring_home(context, i));
    return epmoei_stream_wait(context->backend, STREAM);
}

/* --------------------------------------------------------------------------------------- what run functions ask for */

const op_value_t *op_tensor(const op_context_t *context, const char *name)
{
    return &context->tensors[op_find_tensor(context->op, name)];
}

int32_t op_dim(const op_context_t *context, char letter) { return (int32_t)context->dims[(unsigned char)letter]; }

bool op_has(const op_context_t *context, const char *key)
{
    return context->given[op_find_key(context->op, key, strlen(key))];
}

int32_t op_number(const op_context_t *context, const char *key)
{
    return (int32_t)context->keys[op_find_key(context->op, key, strlen(key))];
}

float op_real(const op_context_t *context, const char *key)
{
    return (float)context->keys[op_find_key(context->op, key, strlen(key))];
}

epmoe_backend_t op_backend(const op_context_t *context) { return context->backend; }

void *op_output(op_context_t *context, const char *name, epmoe_dtype_t dtype, int32_t num_dims, const int64_t *shape)
{
    int32_t i = context->num_outputs;
    safetensors_output_t *output = &context->outputs[i];
    *output = (safetensors_output_t){.name = name, .dtype = dtype, .num_dims = num_dims};
    memcpy(output->shape, shape, (size_t)num_dims * sizeof *shape);
    int64_t bytes = output_bytes(output);
    /* Bytes 0xFF are a NaN in every float type; as an id they would be the valid -1. */
    int32_t poison = dtype == EPMOE_I32 ? 0x7F : 0xFF;
    if (bytes < 0 || epmoei_memory_alloc(context->backend, &context->output_data[i], bytes, name) != EPMOE_OK ||
        epmoei_memory_set(context->backend, context->output_data[i], poison, bytes, STREAM) != EPMOE_OK)
        return NULL;
    context->num_outputs++;
    return context->output_data[i];
}

void *op_output_copy(op_context_t *context, const char *name, const op_value_t *value)
{
    int64_t bytes = epmoe_dtype_size(value->dtype);
    for (int32_t i = 0; i < value->num_dims; i++) bytes *= value->shape[i];
    void *data = op_output(context, name, value->dtype, value->num_dims, value->shape);
    if (data && epmoei_memory_copy(context->backend, data, value->data, bytes, STREAM) != EPMOE_OK) return NULL;
    return data;
}

void *op_scratch(op_context_t *context, int64_t bytes)
{
    void **scratch = &context->scratch[context->num_scratch];
    if (epmoei_memory_alloc(context->backend, scratch, bytes, "scratch") == EPMOE_OK) context->num_scratch++;
    return *scratch;
}

void *op_host_scratch(op_context_t *context, int64_t bytes) { return context->host_scratch = epmoei_alloc(bytes); }
