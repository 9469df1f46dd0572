/* The final norm and the product with the vocabulary. */
#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/linear.h"
#include "kernels/op_check.h"
#include "moe/checkpoint.h"
#include "moe/weight_writer.h"

struct epmoe_head {
    epmoe_head_config_t config; /* every default filled in */
    void *workspace_memory;
    void *rows; /* [max_tokens,d] */
    void *gemm;
    int64_t gemm_bytes;
    void *weights_memory; /* NULL before weights were loaded */
    float *norm;          /* [d] */
    epmoei_linear_t linear;
};

static epmoe_status_t check_config(const epmoe_head_config_t *config, epmoe_head_config_t *out)
{
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, config, "epmoe_head_config_t"));
    EPMOEI_CHECK(epmoei_check_range("hidden", out->hidden, 1, 1 << 26));
    EPMOEI_CHECK(epmoei_check_range("vocab_size", out->vocab_size, 1, EPMOE_MAX_VOCAB));
    EPMOEI_CHECK(epmoei_check_volume("the head's weight", out->vocab_size, out->hidden, 1));
    if (out->norm_eps == 0) out->norm_eps = 1e-6f;
    if (!(out->norm_eps > 0 && out->norm_eps < 1))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "norm_eps is %g: expected 0 to 1", (double)out->norm_eps);
    if (out->dtype == EPMOE_DTYPE_NONE) out->dtype = EPMOE_BF16;
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (out->max_tokens == 0) out->max_tokens = 4096;
    EPMOEI_CHECK(epmoei_check_range("max_tokens", out->max_tokens, 1, INT32_MAX));
    EPMOEI_CHECK(epmoe_backend_resolve(out->backend, &backend));
    out->backend = backend;
    if (backend == EPMOE_BACKEND_CPU) return EPMOE_OK;
    if (out->dtype == EPMOE_F32)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "dtype is f32: on CUDA the head computes bf16 and f16");
    if (out->hidden % 8)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "hidden is %d: on CUDA it must be a multiple of 8", out->hidden);
    return EPMOE_OK;
}

static epmoe_status_t make(epmoe_head_t *head)
{
    const epmoe_head_config_t *config = &head->config;
    head->linear = (epmoei_linear_t){.n = config->vocab_size, .k = config->hidden, .heads = 1};
    if (config->backend == EPMOE_BACKEND_CUDA) head->linear.format = epmoei_format_of_dtype(config->dtype);
    EPMOEI_CHECK(
        epmoei_linear_workspace(&head->linear, config->backend, config->dtype, config->max_tokens, &head->gemm_bytes));
    epmoei_arena_t arena = {0};
    int64_t rows_bytes = (int64_t)config->max_tokens * config->hidden * epmoe_dtype_size(config->dtype);
    epmoei_carve(&arena, rows_bytes);
    epmoei_carve(&arena, head->gemm_bytes);
    EPMOEI_CHECK(epmoei_memory_alloc(config->backend, &head->workspace_memory, arena.used, "the head's workspace"));
    arena = (epmoei_arena_t){head->workspace_memory, 0};
    head->rows = epmoei_carve(&arena, rows_bytes);
    head->gemm = epmoei_carve(&arena, head->gemm_bytes);
    return EPMOE_OK;
}

epmoe_status_t epmoe_head_create(const epmoe_head_config_t *config, epmoe_head_t **out)
{
    if (!out) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "head is NULL");
    epmoe_head_config_t checked = EPMOE_HEAD_CONFIG_INIT;
    *out = NULL;
    EPMOEI_CHECK(check_config(config, &checked));
    epmoe_head_t *head = epmoei_calloc((int64_t)sizeof *head);
    if (!head) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a head");
    head->config = checked;
    epmoe_status_t status = make(head);
    if (status == EPMOE_OK)
        *out = head;
    else
        epmoe_head_destroy(head);
    return status;
}

void epmoe_head_destroy(epmoe_head_t *head)
{
    if (!head) return;
    epmoei_memory_free(head->config.backend, head->workspace_memory);
    epmoei_memory_free(head->config.backend, head->weights_memory);
    epmoei_free(head);
}

static void carve_weights(epmoei_arena_t *arena, epmoe_head_t *head, epmoe_dtype_t dtype)
{
    int64_t d = head->config.hidden;
    head->norm = epmoei_carve(arena, d * 4);
    head->linear.format = epmoei_format_of_dtype(dtype);
    head->linear.weight = epmoei_carve(arena, d * head->config.vocab_size * epmoe_dtype_size(dtype));
}

static epmoe_status_t copy_weights(epmoe_head_t *head, const epmoei_view_t *norm, const epmoei_view_t *weight)
{
    epmoei_weight_writer_t writer;
    EPMOEI_CHECK(epmoei_writer_open(&writer, head->config.backend));
    epmoe_status_t status = epmoei_writer_put(&writer, norm, head->norm, EPMOE_F32, 0, 1);
    if (status == EPMOE_OK)
        status = epmoei_writer_put(&writer, weight, (void *)(uintptr_t)head->linear.weight,
                                   epmoei_dtype_of_format(head->linear.format), 0, 1);
    if (status == EPMOE_OK) status = epmoei_writer_wait(&writer);
    epmoei_writer_close(&writer);
    return status;
}

epmoe_status_t epmoe_head_load_checkpoint(epmoe_head_t *head, const epmoe_checkpoint_t *checkpoint)
{
    if (!head) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "head is NULL");
    epmoei_memory_free(head->config.backend, head->weights_memory);
    head->weights_memory = NULL;
    epmoe_head_config_t file = EPMOE_HEAD_CONFIG_INIT;
    epmoei_view_t norm, weight;
    EPMOEI_CHECK(epmoe_checkpoint_head_config(checkpoint, &file));
    if (file.hidden != head->config.hidden || file.vocab_size != head->config.vocab_size ||
        file.norm_eps != head->config.norm_eps)
        return epmoei_fail(EPMOE_ERROR_MISMATCH,
                           "the head's hidden, vocab_size and norm_eps are %d, %d and %g, and the checkpoint's are %d, "
                           "%d and %g",
                           head->config.hidden, head->config.vocab_size, (double)head->config.norm_eps, file.hidden,
                           file.vocab_size, (double)file.norm_eps);
    EPMOEI_CHECK(epmoei_checkpoint_head_source(checkpoint, &norm, &weight));
    epmoei_arena_t arena = {0};
    /* A device multiplies matrices of the rows' dtype alone. */
    epmoe_backend_t backend = head->config.backend;
    epmoe_dtype_t dtype = backend == EPMOE_BACKEND_CUDA ? head->config.dtype : weight.dtype;
    carve_weights(&arena, head, dtype);
    EPMOEI_CHECK(epmoei_memory_alloc(backend, &head->weights_memory, arena.used, "the head's weights"));
    arena = (epmoei_arena_t){head->weights_memory, 0};
    carve_weights(&arena, head, dtype);
    epmoe_status_t status = copy_weights(head, &norm, &weight);
    if (status == EPMOE_OK) return EPMOE_OK;
    epmoei_memory_free(backend, head->weights_memory);
    head->weights_memory = NULL;
    return status;
}

epmoe_status_t epmoe_head_forward(epmoe_head_t *head, const void *x, float *logits, int32_t num_tokens,
                                  epmoe_stream_t stream)
{
    if (!head) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "head is NULL");
    const epmoe_head_config_t *config = &head->config;
    if (!head->weights_memory) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the head has no weights: load them");
    if (num_tokens < 0 || num_tokens > config->max_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d: expected 0..%d (max_tokens)", num_tokens,
                           config->max_tokens);
    if (num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", x));
    EPMOEI_CHECK(epmoei_check_pointer("logits", logits));
    epmoe_rms_norm_args_t norm = EPMOE_RMS_NORM_ARGS_INIT;
    norm.backend = config->backend;
    norm.num_tokens = num_tokens;
    norm.hidden = config->hidden;
    norm.dtype = config->dtype;
    norm.weight_dtype = EPMOE_F32;
    norm.x = x;
    norm.weight = head->norm;
    norm.eps = config->norm_eps;
    norm.y = head->rows;
    EPMOEI_CHECK(epmoe_rms_norm(&norm, stream));
    const epmoei_linear_run_t run = {.backend = config->backend,
                                     .stream = stream,
                                     .dtype = config->dtype,
                                     .workspace = head->gemm,
                                     .workspace_bytes = head->gemm_bytes};
    return epmoei_linear(&run, &head->linear, num_tokens, head->rows, EPMOE_F32, logits);
}
