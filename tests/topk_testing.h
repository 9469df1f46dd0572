/* One call of the router op with poisoned and guarded outputs, run on the public entry and on both kernels. */
#ifndef EPMOE_TOPK_TESTING_H
#define EPMOE_TOPK_TESTING_H

#include "kernels/topk.h"
#include "tests/op_testing.h"

typedef struct call_t {
    epmoe_topk_args_t args;
    int32_t *ids;
    float *weights;
} call_t;

static inline call_t call_make(int32_t num_tokens, int32_t num_experts, int32_t top_k, const void *logits)
{
    call_t call = {.args = EPMOE_TOPK_ARGS_INIT};
    call.args.num_tokens = num_tokens;
    call.args.num_experts = num_experts;
    call.args.top_k = top_k;
    call.args.logits = logits;
    call.ids = call.args.ids = testing_buffer(4 * (int64_t)num_tokens * top_k, 4);
    call.weights = call.args.weights = testing_buffer(4 * (int64_t)num_tokens * top_k, 4);
    return call;
}

static inline void call_free(call_t *call)
{
    cr_assert(testing_guards_intact(call->ids));
    cr_assert(testing_guards_intact(call->weights));
    testing_buffer_free(call->ids);
    testing_buffer_free(call->weights);
}

/* Runs the public entry and compares both kernels with it, bit for bit. */
static inline void call_run(call_t *call)
{
    int64_t n = (int64_t)call->args.num_tokens * call->args.top_k;
    cr_assert_eq(epmoe_topk(&call->args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    epmoe_status_t (*const kernels[])(const epmoe_topk_args_t *, epmoe_stream_t) = {epmoei_topk_ref, epmoei_topk_cpu};
    for (int i = 0; i < 2; i++) {
        epmoe_topk_args_t checked;
        cr_assert_eq(epmoei_topk_check(&call->args, &checked), EPMOE_OK);
        checked.ids = testing_buffer(4 * n, 0);
        checked.weights = testing_buffer(4 * n, 0);
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        cr_assert_eq(memcmp(checked.ids, call->ids, 4 * (size_t)n), 0, "ids of kernel %d differ", i);
        cr_assert_eq(memcmp(checked.weights, call->weights, 4 * (size_t)n), 0, "weights of kernel %d differ", i);
        cr_assert(testing_guards_intact(checked.ids) && testing_guards_intact(checked.weights));
        testing_buffer_free(checked.ids);
        testing_buffer_free(checked.weights);
    }
}

#endif
