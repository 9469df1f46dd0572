/* Experts of FP8_BLOCK weights by quantised activations: one call, in which h stays quantised, against the ops it is
 * made of, and against the CPU. */
#include "base/dtype.h"
#include "tests/checkcuda/check_fp8.h"

#include <math.h>

static void must(epmoe_status_t status, const char *what)
{
    if (status != EPMOE_OK) check_fail(NULL, "%s: %s", what, epmoe_last_error());
}

/* A piece of device memory that holds the next bytes. */
static void *piece(char **at, int64_t bytes)
{
    char *mine = *at;
    *at += epmoei_round_up(bytes, 256);
    return mine;
}

/* The ops that experts are made of, with h rounded in memory: y [T,d] of dtype on the device. */
static void run_unfused(const epmoe_experts_args_t *e, char *memory, void *y)
{
    int32_t slots = e->num_tokens * e->top_k;
    epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT;
    align.backend = EPMOE_BACKEND_CUDA;
    align.num_tokens = e->num_tokens;
    align.top_k = e->top_k;
    align.num_experts = e->num_experts;
    align.ids = e->ids;
    align.sorted_ids = piece(&memory, slots * 4);
    align.num_post_padded = piece(&memory, 4);
    align.expert_offsets = piece(&memory, ((int64_t)e->num_experts + 1) * 4);
    must(epmoe_align_workspace_size(&align, &align.workspace_bytes), "align");
    align.workspace = piece(&memory, align.workspace_bytes);
    must(epmoe_align_block_size(&align, check_stream), "align");

    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = EPMOE_BACKEND_CUDA;
    gemm.num_experts = e->num_experts;
    gemm.n = 2 * e->intermediate;
    gemm.k = e->hidden;
    gemm.max_rows = gemm.num_slots = slots;
    gemm.expert_offsets = align.expert_offsets;
    gemm.row_index = align.sorted_ids;
    gemm.x_row_divisor = e->top_k;
    gemm.x_dtype = gemm.y_dtype = e->dtype;
    gemm.x = e->x;
    gemm.weight = e->gate_up;
    gemm.layout = e->layout;
    gemm.activation = e->activation;
    gemm.fp8_activations = 1;
    gemm.y_sorted = 1;
    gemm.y = piece(&memory, (int64_t)slots * e->intermediate * 2);
    must(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes), "gate_up");
    gemm.workspace = piece(&memory, gemm.workspace_bytes);
    must(epmoe_grouped_gemm(&gemm, check_stream), "gate_up");

    gemm.x = gemm.y;
    gemm.x_sorted = 1, gemm.y_sorted = 0, gemm.x_row_divisor = 1;
    gemm.n = e->hidden;
    gemm.k = e->intermediate;
    gemm.weight = e->down;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    gemm.row_weights = e->weights;
    gemm.y_dtype = e->dtype == EPMOE_BF16 ? EPMOE_BF16 : EPMOE_F32;
    gemm.y = piece(&memory, (int64_t)slots * e->hidden * 4);
    must(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes), "down");
    gemm.workspace = piece(&memory, gemm.workspace_bytes);
    must(epmoe_grouped_gemm(&gemm, check_stream), "down");

    epmoe_sum_args_t sum = EPMOE_SUM_ARGS_INIT;
    sum.backend = EPMOE_BACKEND_CUDA;
    sum.num_tokens = e->num_tokens;
    sum.top_k = e->top_k;
    sum.hidden = e->hidden;
    sum.y_dtype = gemm.y_dtype;
    sum.out_dtype = e->dtype;
    sum.y = gemm.y;
    sum.ids = e->ids;
    sum.out = y;
    must(epmoe_sum(&sum, check_stream), "sum");
}

static epmoe_status_t run_experts(const void *args, epmoe_stream_t stream) { return epmoe_experts(args, stream); }

/* The CPU's. */
static epmoe_status_t reference_experts(const void *args)
{
    epmoe_experts_args_t experts = *(const epmoe_experts_args_t *)args;
    epmoe_status_t status = epmoe_experts_workspace_size(&experts, &experts.workspace_bytes);
    if (status != EPMOE_OK) return status;
    experts.workspace = epmoei_alloc(experts.workspace_bytes);
    status = epmoe_experts(&experts, NULL);
    epmoei_free(experts.workspace);
    return status;
}

/* Single codes of h fall the other way where h lies between two. */
static bool compare_experts(check_case_t *c, const check_field_t *field) { return check_fp8_norms(c, field, 2e-2); }

static const check_op_t experts_op = {"experts_fp8", sizeof(epmoe_experts_args_t), run_experts, reference_experts};

/* h that stays quantised gives the bits of h that is rounded to memory and quantised from there. */
void check_experts_fp8(testing_rng_t *rng)
{
    check_begin(experts_op.name, "one call against its parts, bit for bit");
    const int32_t tokens[] = {1, 5, 33, 130, 300}, widths[][2] = {{128, 128}, {144, 400}, {528, 256}, {80, 16}};
    for (int32_t i = 0; i < 2 * 5 * 4; i += check_step(7)) {
        int32_t d = widths[i / 5 % 4][0], f = widths[i / 5 % 4][1], num_experts = i % 3 ? 6 : 2, top_k = 2;
        bool halves = f % 128 == 0; /* an order that the CPU has too */
        bool of_rows = i >= 20;     /* a scale for each row of a weight, and not for 128 by 128 */
        int32_t group = of_rows ? -1 : 0, high = of_rows;
        int64_t slots = (int64_t)tokens[i % 5] * top_k;
        check_case_t c;
        check_case(&c, &experts_op, "T %d E %d d %d f %d group %d %s", tokens[i % 5], num_experts, d, f, group,
                   epmoe_dtype_string(i / 5 % 2 ? EPMOE_F16 : EPMOE_BF16));
        c.compare = compare_experts;
        epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CUDA;
        args.num_tokens = tokens[i % 5];
        args.top_k = top_k;
        args.num_experts = num_experts;
        args.hidden = d;
        args.intermediate = f;
        args.dtype = i / 5 % 2 ? EPMOE_F16 : EPMOE_BF16;
        args.gate_up.struct_size = args.down.struct_size = sizeof args.gate_up;
        args.gate_up.format = args.down.format = EPMOE_FORMAT_FP8_BLOCK;
        args.gate_up.group_size = args.down.group_size = group;
        args.gate_up.group_rows = args.down.group_rows = high;
        args.layout = halves ? EPMOE_LAYOUT_GATE_FIRST : EPMOE_LAYOUT_PACKED;
        args.activation = EPMOE_ACTIVATION_SILU;
        args.fp8_activations = 1;
        if (epmoe_experts_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK)
            check_fail(&c, "%s", epmoe_last_error());
        memcpy(c.args, &args, sizeof args);
        int64_t up = (int64_t)num_experts * 2 * f, down = (int64_t)num_experts * d;
        int64_t up_scales = num_experts * check_fp8_scales(group, high, 2 * f, d, !halves);
        int64_t down_scales = num_experts * check_fp8_scales(group, high, d, f, false);
        void *x = CHECK_ADD(&c, epmoe_experts_args_t, x, CHECK_IN, args.dtype, args.num_tokens, d, 16);
        int32_t *ids = CHECK_ADD(&c, epmoe_experts_args_t, ids, CHECK_IN, EPMOE_I32, 1, slots, 4);
        float *weights = CHECK_ADD(&c, epmoe_experts_args_t, weights, CHECK_IN, EPMOE_F32, 1, slots, 4);
        void *w13 = CHECK_ADD(&c, epmoe_experts_args_t, gate_up.data, CHECK_IN, EPMOE_F8_E4M3, up, d, 16);
        void *s13 = CHECK_ADD(&c, epmoe_experts_args_t, gate_up.scales, CHECK_IN, EPMOE_F32, 1, up_scales, 16);
        void *w2 = CHECK_ADD(&c, epmoe_experts_args_t, down.data, CHECK_IN, EPMOE_F8_E4M3, down, f, 16);
        void *s2 = CHECK_ADD(&c, epmoe_experts_args_t, down.scales, CHECK_IN, EPMOE_F32, 1, down_scales, 16);
        testing_fill_normal(rng, x, args.dtype, (int64_t)args.num_tokens * d, 1.0f);
        check_fp8_weight(rng, w13, up * d, s13, EPMOE_F32, up_scales, d);
        check_fp8_weight(rng, w2, down * f, s2, EPMOE_F32, down_scales, f);
        for (int64_t s = 0; s < slots; s++) {
            ids[s] = testing_range(rng, -1, num_experts - 1);
            weights[s] = testing_uniform(rng, 0.2f, 1.0f);
        }
        check_field_t *y = &c.fields[c.num_fields];
        CHECK_ADD(&c, epmoe_experts_args_t, y, CHECK_OUT, args.dtype, args.num_tokens, d, 16);
        CHECK_ADD(&c, epmoe_experts_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 16);
        bool expected = !halves || check_expect(&c);
        check_upload(&c);
        if (expected && check_launch(&c) == EPMOE_OK && check_download(&c)) {
            if (halves) check_outputs(&c);
            void *memory = NULL, *parts = testing_buffer(y->bytes, 0);
            must(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &memory, slots * (8 * d + 8 * f) + (1 << 20), "parts"),
                 "parts");
            run_unfused((const epmoe_experts_args_t *)c.args, memory, y->device);
            epmoei_memory_copy(EPMOE_BACKEND_CUDA, parts, y->device, y->bytes, check_stream);
            must(epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream), "parts");
            if (memcmp(parts, y->got, (size_t)y->bytes)) check_fail(&c, "one call and its parts differ");
            epmoei_memory_free(EPMOE_BACKEND_CUDA, memory);
            testing_buffer_free(parts);
        } else {
            check_fail(&c, "%s", epmoe_last_error());
        }
        check_free(&c);
    }
    check_end();
}
