/* The experts on quantised weights as one call, of few tokens and of more, which take other kernels. */
#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/experts_few.h"
#include "moe/experts.h"
#include "tests/checkcuda/quant_weight.h"

#include <math.h>
#include <stdlib.h>

typedef struct shape_t {
    quant_weight_t gate_up, down;
    int32_t tokens, top_k, experts, d, f;
    epmoe_dtype_t dtype, y_dtype;
    epmoe_activation_t activation;
    bool bias, on_input, addend, residual, counted, crowded;
    int32_t actual; /* counted: what num_tokens_dev says */
    float limit;
} shape_t;

static const shape_t *current;

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_experts(args, stream); }

static float dot(const float *w, const void *x, epmoe_dtype_t dtype, int64_t row, int64_t k)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < k; i++) sum += w[i] * epmoei_load(x, dtype, row * k + i);
    return sum;
}

static void reference_slot(const epmoe_experts_args_t *args, const float *w13, const float *b13, int64_t slot, void *h)
{
    int64_t d = args->hidden, f = args->intermediate, expert = args->ids[slot];
    const float *w = w13 + expert * 2 * f * d, *b = b13 ? b13 + expert * 2 * f : NULL;
    for (int64_t i = 0; i < f; i++) {
        float gate = dot(w + i * d, args->x, args->dtype, slot / args->top_k, d);
        float up = dot(w + (f + i) * d, args->x, args->dtype, slot / args->top_k, d);
        if (args->weight_on_input) gate *= args->weights[slot], up *= args->weights[slot];
        if (b) gate += b[i], up += b[f + i];
        epmoei_store(h, args->dtype, slot * f + i,
                     epmoei_activate(args->activation, gate, up, args->alpha, args->limit));
    }
}

static float reference_output(const epmoe_experts_args_t *args, const float *w2, const void *h, int64_t t, int64_t i)
{
    int64_t d = args->hidden, f = args->intermediate;
    float sum = 0.0f;
    for (int64_t slot = t * args->top_k; slot < (t + 1) * args->top_k; slot++) {
        int64_t expert = args->ids[slot];
        if (expert < 0 || expert >= args->num_experts) continue;
        float value = dot(w2 + (expert * d + i) * f, h, args->dtype, slot, f);
        if (args->down_bias) value += args->down_bias[expert * d + i];
        sum += args->weight_on_input ? value : args->weights[slot] * value;
    }
    if (args->addend) sum += args->addend[t * d + i];
    if (args->residual) sum += epmoei_load(args->residual, args->y_dtype, t * d + i);
    return sum;
}

static epmoe_status_t reference(const void *args)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    float *w13 = quant_weight_values(&checked.gate_up, &current->gate_up);
    float *w2 = quant_weight_values(&checked.down, &current->down);
    float *b13 = quant_weight_bias(checked.gate_up_bias, &current->gate_up);
    int64_t tokens = checked.num_tokens_dev ? *checked.num_tokens_dev : checked.num_tokens, d = checked.hidden;
    int64_t slots = tokens * checked.top_k;
    void *h = malloc((size_t)(slots * checked.intermediate * 2) + 1);
#pragma omp parallel for schedule(dynamic)
    for (int64_t slot = 0; slot < slots; slot++)
        if (checked.ids[slot] >= 0 && checked.ids[slot] < checked.num_experts)
            reference_slot(&checked, w13, b13, slot, h);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < tokens * d; i++)
        epmoei_store(checked.y, checked.y_dtype, i, reference_output(&checked, w2, h, i / d, i % d));
    free(w13), free(w2), free(b13), free(h);
    return EPMOE_OK;
}

static const check_op_t op = {"few_quant", sizeof(epmoe_experts_args_t), run, reference};

static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    int32_t *ids = (int32_t *)(void *)check_find(c, "ids")->host;
    float *weights = (float *)(void *)check_find(c, "weights")->host;
    int32_t counting = shape->counted ? shape->actual : shape->tokens, two[2];
    for (int i = 0; i < 2; i++) two[i] = testing_range(rng, 0, shape->experts - 1);
    for (int32_t s = 0; s < shape->tokens * shape->top_k; s++) {
        ids[s] = shape->crowded ? two[testing_range(rng, 0, 1)] : testing_range(rng, 0, shape->experts - 1);
        if (testing_range(rng, 0, 9) == 0) ids[s] = -1;
        if (s / shape->top_k >= counting) ids[s] = -77; /* reported if anybody read it */
        weights[s] = ids[s] < 0 ? NAN : testing_uniform(rng, 0.1f, 2.0f);
    }
    check_fill_normal(rng, check_find(c, "x")->host, shape->dtype, (int64_t)shape->tokens * shape->d,
                      1.0f / sqrtf((float)shape->d));
}

#define ADD(member, kind, dtype, rows, cols, alignment)                                                                \
    CHECK_ADD(c, epmoe_experts_args_t, member, kind, dtype, rows, cols, alignment)

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    static const char *const names[2][4] = {{"gate_up.data", "gate_up.scales", "gate_up.zeros", "gate_up.g_idx"},
                                            {"down.data", "down.scales", "down.zeros", "down.g_idx"}};
    const quant_weight_t *w13 = &shape->gate_up, *w2 = &shape->down;
    current = shape;
    check_case(
        c, &op,
        "%s %s group %d %s zeros %d order %d, %s %s group %d zeros %d order %d, T %d (%d) k %d E %d d %d f %d %s "
        "to %s act %d bias %d on input %d crowded %d",
        epmoe_format_string(w13->format), epmoe_dtype_string(w13->scales_dtype), w13->group,
        w13->layout == EPMOE_LAYOUT_PACKED ? "packed" : "as it is", w13->zeros, w13->order,
        epmoe_format_string(w2->format), epmoe_dtype_string(w2->scales_dtype), w2->group, w2->zeros, w2->order,
        shape->tokens, shape->counted ? shape->actual : shape->tokens, shape->top_k, shape->experts, shape->d, shape->f,
        epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype), (int)shape->activation, shape->bias,
        shape->on_input, shape->crowded);
    /* The order of fp32 sums, an h that rounds the other way, and with more tokens rows rounded to bf16 or summed. */
    c->tolerance =
        1e-5 + 0x1p-20 * sqrt(shape->f * (double)shape->top_k) + (shape->dtype == EPMOE_BF16 ? 1.6e-2 : 1e-3);
    /* Powers of two of which one is 8 times another, with zero points: 2^-8 of a single term may be 2% of the rms. */
    if (w2->format == EPMOE_FORMAT_W4 && w2->scales_dtype == EPMOE_F8_E8M0 && shape->dtype == EPMOE_BF16)
        c->tolerance += 1.6e-2;
    if (shape->tokens > 4)
        c->tolerance +=
            quant_weight_rounding(w13->format, shape->dtype) + quant_weight_rounding(w2->format, shape->dtype);
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_tokens = shape->tokens, args.top_k = shape->top_k, args.num_experts = shape->experts;
    args.hidden = shape->d, args.intermediate = shape->f;
    args.dtype = shape->dtype, args.y_dtype = shape->y_dtype;
    args.gate_up = quant_weight_fields(w13), args.down = quant_weight_fields(w2);
    args.layout = w13->layout;
    args.activation = shape->activation;
    args.limit = shape->limit;
    args.weight_on_input = shape->on_input;
    epmoe_experts_args_t query = args;
    query.gate_up.g_idx = w13->order ? (const int32_t *)c : NULL; /* whether there is one decides */
    query.down.g_idx = w2->order ? (const int32_t *)c : NULL;
    if (epmoe_experts_workspace_size(&query, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    int64_t tokens = shape->tokens, k = shape->top_k, experts = shape->experts, d = shape->d, f = shape->f;
    ADD(ids, CHECK_IN, EPMOE_I32, tokens, k, 4);
    ADD(weights, CHECK_IN, EPMOE_F32, tokens, k, 4);
    ADD(x, CHECK_IN, shape->dtype, tokens, d, 16);
    if (shape->counted) *(int32_t *)ADD(num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4) = shape->actual;
    fill(rng, c, shape);
    quant_weight_add(c, rng, offsetof(epmoe_experts_args_t, gate_up), names[0], w13);
    quant_weight_add(c, rng, offsetof(epmoe_experts_args_t, down), names[1], w2);
    if (shape->bias) {
        check_fill_normal(rng, ADD(gate_up_bias, CHECK_IN, EPMOE_F32, experts, 2 * f, 4), EPMOE_F32, experts * 2 * f,
                          0.5f);
        check_fill_normal(rng, ADD(down_bias, CHECK_IN, EPMOE_F32, experts, d, 4), EPMOE_F32, experts * d, 0.5f);
    }
    if (shape->addend)
        check_fill_normal(rng, ADD(addend, CHECK_IN, EPMOE_F32, tokens, d, 16), EPMOE_F32, tokens * d, 0.3f);
    if (shape->residual)
        check_fill_normal(rng, ADD(residual, CHECK_IN, shape->y_dtype, tokens, d, 16), shape->y_dtype, tokens * d,
                          0.3f);
    ADD(workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 1);
    ADD(y, CHECK_OUT, shape->y_dtype, tokens, d, 16);
}

static const epmoe_format_t formats[] = {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
static const epmoe_dtype_t scales_dtypes[] = {EPMOE_F32, EPMOE_F16, EPMOE_BF16, EPMOE_F8_E8M0};

static quant_weight_t random_weight(testing_rng_t *rng, epmoe_format_t format, int32_t experts, int32_t n, int32_t k,
                                    bool gated, epmoe_layout_t layout)
{
    static const int32_t groups[] = {0, 64, 192, -1, 32, 16}, group_rows[] = {0, 0, 1, 128, -1};
    bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK, w4 = format == EPMOE_FORMAT_W4;
    return (quant_weight_t){
        .format = format,
        .scales_dtype = format == EPMOE_FORMAT_MXFP4 ? EPMOE_F8_E8M0 : scales_dtypes[testing_range(rng, 0, 3)],
        .experts = experts,
        .n = n,
        .k = k,
        .group = format == EPMOE_FORMAT_MXFP4 ? 0 : groups[testing_range(rng, 0, w4 ? 5 : 3)],
        .gated = gated,
        .zeros = !fp8 && testing_range(rng, 0, 1),
        .order = w4 && testing_range(rng, 0, 2) == 0,
        .layout = fp8 ? layout : EPMOE_LAYOUT_PACKED,
        .group_rows = fp8 ? group_rows[testing_range(rng, 0, 4)] : 0,
    };
}

static void choose_weights(testing_rng_t *rng, shape_t *shape, epmoe_format_t gate_up, epmoe_format_t down)
{
    bool fp8 = gate_up == EPMOE_FORMAT_FP8_BLOCK && down == EPMOE_FORMAT_FP8_BLOCK;
    epmoe_layout_t layout = fp8 ? (epmoe_layout_t)testing_range(rng, 0, 2) : EPMOE_LAYOUT_PACKED;
    shape->gate_up = random_weight(rng, gate_up, shape->experts, 2 * shape->f, shape->d, true, layout);
    shape->down = random_weight(rng, down, shape->experts, shape->d, shape->f, false, layout);
}

static shape_t random_shape(testing_rng_t *rng, epmoe_format_t gate_up, epmoe_format_t down, int32_t tokens)
{
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16}, y_dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
    bool mxfp4 = gate_up == EPMOE_FORMAT_MXFP4 || down == EPMOE_FORMAT_MXFP4;
    int32_t step = mxfp4 ? 32 : gate_up == EPMOE_FORMAT_W4 && down == EPMOE_FORMAT_W4 ? 8 : 16;
    /* Nine slots have kernels of their own. */
    const int32_t most = testing_range(rng, 0, 3) ? 8 : 32;
    shape_t shape = {.tokens = tokens,
                     .top_k = testing_range(rng, 0, 4) ? testing_range(rng, 1, most) : 9,
                     .experts = testing_range(rng, 1, 40),
                     .d = step * testing_range(rng, 1, 480 / step),
                     .f = step * testing_range(rng, 1, 320 / step),
                     .dtype = dtypes[testing_range(rng, 0, 1)],
                     .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                     .activation = (epmoe_activation_t)testing_range(rng, 0, 3),
                     .bias = testing_range(rng, 0, 1),
                     .on_input = testing_range(rng, 0, 3) == 0,
                     .addend = testing_range(rng, 0, 1),
                     .residual = testing_range(rng, 0, 1),
                     .counted = testing_range(rng, 0, 2) == 0,
                     .crowded = testing_range(rng, 0, 2) == 0,
                     .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
    shape.actual = testing_range(rng, 0, tokens);
    choose_weights(rng, &shape, gate_up, down);
    return shape;
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    (void)round;
    fill(ctx, c, current);
}

static void check_tokens(testing_rng_t *rng, const char *group, int32_t first, int32_t last, int32_t cases)
{
    check_begin("few_quant", group);
    for (int32_t i = 0; i < cases; i += check_step(7)) {
        epmoe_format_t gate_up = formats[i % 3], down = i % 4 ? gate_up : formats[testing_range(rng, 0, 2)];
        shape_t shape = random_shape(rng, gate_up, down, testing_range(rng, first, last));
        if (check_skips((int64_t)shape.experts * shape.d * shape.f)) continue;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

void check_few_quant(testing_rng_t *rng)
{
    check_tokens(rng, "T 1..4, every format and its variants", 1, 4, 240);
    check_tokens(rng, "T 5..130", 5, 130, 60);

    check_begin("few_quant", "one token of a large model");
    for (int32_t i = 0; i < 6 && !check_small; i++) {
        shape_t shape = {.tokens = 1 + i % 3,
                         .top_k = 8 + i / 3,
                         .experts = 12,
                         .d = 7168,
                         .f = 2048,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16};
        choose_weights(rng, &shape, formats[i % 3], formats[i % 3]);
        shape.gate_up.group = shape.down.group = 0;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_free(&c);
    }
    check_end();

    /* gate_up near 1, so that h is finite; T 1 and 40 are of two kernels. */
    static const uint8_t any[] = {0, 1, 127, 128, 129, 200}, near[] = {121, 122, 127, 128, 129};
    check_begin("few_quant", "mxfp4 with scales of all sizes");
    for (int32_t i = 0; i < 14; i++) {
        shape_t shape = random_shape(rng, EPMOE_FORMAT_MXFP4, EPMOE_FORMAT_MXFP4, i % 2 ? 40 : 1);
        shape.dtype = EPMOE_BF16, shape.y_dtype = i % 4 < 2 ? EPMOE_F32 : EPMOE_BF16;
        shape.addend = shape.residual = shape.bias = false;
        shape.gate_up.codes = near, shape.gate_up.num_codes = 5;
        shape.down.codes = i < 12 ? any + i / 2 : any, shape.down.num_codes = i < 12 ? 1 : 6;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_free(&c);
    }
    check_end();

    check_begin("few_quant", "graphs, bad ids");
    for (int32_t i = 0; i < 6; i++) {
        shape_t shape = random_shape(rng, formats[i % 3], formats[i % 3], i < 3 ? 3 : 40);
        shape.counted = false;
        check_case_t c;
        make(&c, rng, &shape);
        check_graph(&c, refill, rng);
        int32_t *ids = testing_buffer((int64_t)shape.tokens * shape.top_k * 4, 0);
        int32_t *mine = (int32_t *)(void *)check_find(&c, "ids")->host;
        /* The reference leaves out what is out of range as the device does. */
        memcpy(ids, mine, (size_t)(shape.tokens * shape.top_k) * 4);
        float *weights = (float *)(void *)check_find(&c, "weights")->host;
        for (int32_t s = 0; s < shape.tokens * shape.top_k; s++) weights[s] = mine[s] < 0 ? 1.0f : weights[s];
        ids[0] = mine[0] = -1;
        ids[0] = shape.experts;
        check_bad_ids(&c, "ids", ids, 1);
        testing_buffer_free(ids);
        check_free(&c);
    }
    check_end();
}
