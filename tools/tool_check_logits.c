/* moe_tool check: the head, from the last layer's recorded output and from the chain. */
#include "tools/tool_check.h"

#include "base/device.h"
#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

typedef struct logits_run_t {
    epmoe_head_t *head;
    int32_t num_tokens;
    int32_t vocab_size;
    float *in;      /* [T,d]: the last layer's recorded output */
    float *out;     /* [T,V] */
    float *got;     /* [T,V] */
    void *x;        /* [T,d] of dtype */
    bool *left_out; /* nothing */
    epmoe_backend_t backend;
    void *device_x; /* CUDA: x and got in device memory */
    float *device_got;
} logits_run_t;

static epmoe_status_t make_head(const check_t *check, logits_run_t *run, int32_t *hidden)
{
    epmoe_head_config_t config = EPMOE_HEAD_CONFIG_INIT;
    const epmoei_tensor_t *in = check->golden.last_out;
    EPMOEI_CHECK(epmoe_checkpoint_head_config(check->checkpoint, &config));
    *hidden = config.hidden;
    run->vocab_size = config.vocab_size;
    EPMOEI_CHECK(golden_read_rows(in, -1, config.hidden, &run->in));
    int64_t rows = in->num_elements / config.hidden;
    if (rows < 1 || rows > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has %lld rows: expected 1 to %d", in->name,
                           (long long)rows, INT32_MAX);
    run->num_tokens = (int32_t)rows;
    EPMOEI_CHECK(golden_read_rows(check->golden.logits, rows, run->vocab_size, &run->out));
    config.dtype = check->dtype;
    config.max_tokens = run->num_tokens;
    config.backend = check->backend;
    EPMOEI_CHECK(epmoe_head_create(&config, &run->head));
    program_busy(check->program, "loading the head ...");
    const epmoe_status_t loaded = epmoe_head_load_checkpoint(run->head, check->checkpoint);
    program_idle(check->program);
    EPMOEI_CHECK(loaded);
    EPMOEI_CHECK(epmoei_alloc_for((void **)&run->got, rows * run->vocab_size * 4, "the logits"));
    EPMOEI_CHECK(epmoei_alloc_for(&run->x, rows * config.hidden * epmoe_dtype_size(check->dtype), "the head's input"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&run->left_out, rows * (int64_t)sizeof(bool), "the rows of the head"));
    memset(run->left_out, 0, (size_t)rows * sizeof(bool));
    run->backend = check->backend;
    if (run->backend == EPMOE_BACKEND_CPU) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_memory_alloc(run->backend, &run->device_x,
                                     rows * config.hidden * epmoe_dtype_size(check->dtype), "the head's input"));
    return epmoei_memory_alloc(run->backend, (void **)&run->device_got, rows * run->vocab_size * 4, "the logits");
}

static epmoe_status_t forward(const logits_run_t *run, int64_t x_bytes)
{
    if (!run->device_x) return epmoe_head_forward(run->head, run->x, run->got, run->num_tokens, NULL);
    int64_t bytes = (int64_t)run->num_tokens * run->vocab_size * 4;
    EPMOEI_CHECK(epmoei_memory_copy(run->backend, run->device_x, run->x, x_bytes, NULL));
    EPMOEI_CHECK(epmoe_head_forward(run->head, run->device_x, run->device_got, run->num_tokens, NULL));
    EPMOEI_CHECK(epmoei_memory_copy(run->backend, run->got, run->device_got, bytes, NULL));
    return epmoei_stream_wait(run->backend, NULL);
}

static epmoe_status_t judge_logits(check_t *check, const char *item, logits_run_t *run, const float *x, int32_t hidden,
                                   double tolerance)
{
    epmoe_layer_config_t width = EPMOE_LAYER_CONFIG_INIT;
    golden_values_t golden = {.num_tokens = run->num_tokens, .out = run->out};
    check_outputs_t outputs = {.y = run->got};
    check_result_t result;
    int64_t values = (int64_t)run->num_tokens * hidden;
    epmoei_from_f32(run->x, x, check->dtype, values);
    EPMOEI_CHECK(epmoe_comm_agree(check->program->comm, forward(run, values * epmoe_dtype_size(check->dtype))));
    width.hidden = run->vocab_size;
    check_moe(&width, &golden, &outputs, tolerance, run->left_out, true, &result);
    EPMOEI_CHECK(check_gather_worst(check, &result));
    check_report(check, item, tolerance, &result);
    return EPMOE_OK;
}

epmoe_status_t check_logits(check_t *check)
{
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    logits_run_t run = {0};
    int32_t hidden = 0;
    EPMOEI_CHECK(epmoe_checkpoint_get_info(check->checkpoint, &info));
    if (!check->golden.last_out || check->golden.last_layer != info.num_layers - 1) {
        golden_note_unchecked(&check->golden, "logits (the last layer's out0 is missing)");
        return EPMOE_OK;
    }
    epmoe_status_t status = epmoe_comm_agree(check->program->comm, make_head(check, &run, &hidden));
    if (status == EPMOE_OK) status = judge_logits(check, "logits", &run, run.in, hidden, check->decoder_tolerance);
    if (status == EPMOE_OK && check->chain_next == info.num_layers && check->chain_tokens == run.num_tokens)
        status = judge_logits(check, "logits.chained", &run, check->chain, hidden, check->tolerance);
    epmoe_head_destroy(run.head);
    epmoei_free(run.in);
    epmoei_free(run.out);
    epmoei_free(run.got);
    epmoei_free(run.x);
    epmoei_free(run.left_out);
    epmoei_memory_free(run.backend, run.device_x);
    epmoei_memory_free(run.backend, run.device_got);
    /* A head in a format that is not computed: every rank has found the same. */
    if (status != EPMOE_ERROR_NOT_SUPPORTED) return status;
    char text[320];
    snprintf(text, sizeof text, "logits (%.256s)", epmoe_last_error());
    golden_note_unchecked(&check->golden, text);
    return EPMOE_OK;
}
