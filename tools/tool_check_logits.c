/* moe_tool check: the head, from the last layer's recorded output and from the chain. */
#include "tools/tool_check.h"

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
    EPMOEI_CHECK(epmoe_head_load_checkpoint(run->head, check->checkpoint));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&run->got, rows * run->vocab_size * 4, "the logits"));
    EPMOEI_CHECK(epmoei_alloc_for(&run->x, rows * config.hidden * epmoe_dtype_size(check->dtype), "the head's input"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&run->left_out, rows * (int64_t)sizeof(bool), "the rows of the head"));
    memset(run->left_out, 0, (size_t)rows * sizeof(bool));
    return EPMOE_OK;
}

static epmoe_status_t judge_logits(check_t *check, const char *item, logits_run_t *run, const float *x, int32_t hidden,
                                   double tolerance)
{
    epmoe_layer_config_t width = EPMOE_LAYER_CONFIG_INIT;
    golden_values_t golden = {.num_tokens = run->num_tokens, .out = run->out};
    check_outputs_t outputs = {.y = run->got};
    check_result_t result;
    epmoei_from_f32(run->x, x, check->dtype, (int64_t)run->num_tokens * hidden);
    EPMOEI_CHECK(
        epmoe_comm_agree(check->program->comm, epmoe_head_forward(run->head, run->x, run->got, run->num_tokens, NULL)));
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
    /* A head in a format that is not computed: every rank has found the same. */
    if (status != EPMOE_ERROR_NOT_SUPPORTED) return status;
    char text[320];
    snprintf(text, sizeof text, "logits (%.256s)", epmoe_last_error());
    golden_note_unchecked(&check->golden, text);
    return EPMOE_OK;
}
