/* Routing at once: what its callers must hold to, wherever the kernel runs, and the sizes that they plan with. */
#include "base/dtype.h"
#include "kernels/route.h"
#include "kernels/router_gemm.h"
#include "tests/testing.h"

#include <criterion/criterion.h>

enum { kTokens = 3, kExperts = 8, kTopK = 2, kHidden = 16, kRows = kTokens * kTopK };

/* Outputs, poisoned; x and weight are not read before the kernel. */
typedef struct route_case_t {
    epmoei_route_args_t args;
    int32_t *ids, *sorted_ids, *num_post_padded, *expert_offsets;
    float *weights;
} route_case_t;

static const uint16_t inputs[kExperts * kHidden];

static route_case_t open_case(void)
{
    route_case_t c = {.ids = testing_buffer(kRows * 4, 0),
                      .sorted_ids = testing_buffer(kRows * 4, 0),
                      .num_post_padded = testing_buffer(4, 0),
                      .expert_offsets = testing_buffer((kExperts + 1) * 4, 0),
                      .weights = testing_buffer(kRows * 4, 0)};
    c.args = (epmoei_route_args_t){.struct_size = sizeof c.args,
                                   .backend = EPMOE_BACKEND_CPU,
                                   .hidden = kHidden,
                                   .dtype = EPMOE_BF16,
                                   .x = inputs,
                                   .weight = inputs,
                                   .topk = EPMOE_TOPK_ARGS_INIT,
                                   .sorted_ids = c.sorted_ids,
                                   .num_post_padded = c.num_post_padded,
                                   .expert_offsets = c.expert_offsets,
                                   .workspace_bytes = epmoei_route_workspace(kTokens, kExperts, kHidden)};
    c.args.topk.num_tokens = kTokens, c.args.topk.num_experts = kExperts, c.args.topk.top_k = kTopK;
    c.args.topk.ids = c.ids, c.args.topk.weights = c.weights;
    c.args.workspace = testing_buffer(c.args.workspace_bytes, 0);
    return c;
}

static void close_case(route_case_t *c)
{
    testing_buffer_free(c->args.workspace);
    testing_buffer_free(c->ids);
    testing_buffer_free(c->sorted_ids);
    testing_buffer_free(c->num_post_padded);
    testing_buffer_free(c->expert_offsets);
    testing_buffer_free(c->weights);
}

static void expect(route_case_t *c, const epmoei_route_args_t *args, epmoe_status_t status, const char *message)
{
    cr_assert_eq(epmoei_route(args, NULL), status, "expected '%s': %s", message, epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), message), "\"%s\" is not in \"%s\"", message, epmoe_last_error());
    cr_assert(testing_is_poison(c->ids, 0, kRows * 4) && testing_is_poison(c->weights, 0, kRows * 4) &&
                  testing_is_poison(c->sorted_ids, 0, kRows * 4) && testing_is_poison(c->num_post_padded, 0, 4) &&
                  testing_is_poison(c->expert_offsets, 0, (kExperts + 1) * 4),
              "%s: an output was written", message);
}

#define REFUSES(status, message, change)                                                                               \
    do {                                                                                                               \
        epmoei_route_args_t bad = c.args;                                                                              \
        change;                                                                                                        \
        expect(&c, &bad, status, message);                                                                             \
    } while (0)

Test(route, wrong_arguments)
{
    route_case_t c = open_case();
    const epmoe_status_t wrong = EPMOE_ERROR_INVALID_ARGUMENT, cannot = EPMOE_ERROR_NOT_SUPPORTED;
    REFUSES(wrong, "struct_size is 0", bad.struct_size = 0);
    REFUSES(wrong, "top_k is 9", bad.topk.top_k = 9);
    REFUSES(cannot, "dtype is f32: expected bf16 or fp16", bad.dtype = EPMOE_F32);
    REFUSES(cannot, "hidden is 12: expected a multiple of 8", bad.hidden = 12);
    REFUSES(cannot, "hidden is 0", bad.hidden = 0);
    REFUSES(wrong, "topk.logits are bf16 at stride 8: expected dense fp32", bad.topk.logits_dtype = EPMOE_BF16);
    REFUSES(wrong, "topk.logits are f32 at stride 9: expected dense fp32", bad.topk.logits_stride = 9);
    REFUSES(wrong, "x is NULL", bad.x = NULL);
    REFUSES(wrong, "weight is NULL", bad.weight = NULL);
    REFUSES(wrong, "topk.ids is NULL", bad.topk.ids = NULL);
    REFUSES(wrong, "topk.weights is NULL", bad.topk.weights = NULL);
    REFUSES(wrong, "workspace is NULL", bad.workspace = NULL);
    REFUSES(wrong, "num_post_padded is NULL", bad.num_post_padded = NULL);
    REFUSES(wrong, "expert_offsets is NULL", bad.expert_offsets = NULL);
    REFUSES(wrong, "workspace_bytes is 0: expected at least", bad.workspace_bytes = 0);
    REFUSES(wrong, "workspace_bytes is", bad.workspace_bytes--);
    REFUSES(wrong, "joined_weights is NULL", bad.joined_ids = c.ids);
    REFUSES(wrong, "topk.top_k is 32 with joined_ids: expected at most 31", bad.joined_ids = c.ids;
            bad.topk.num_experts = bad.topk.top_k = 32);
    /* Nothing is wrong with these: only CUDA has the kernel. Without an align its outputs are not asked for. */
    REFUSES(cannot, "routing at once has no kernel on this backend", (void)bad);
    REFUSES(cannot, "routing at once has no kernel on this backend",
            bad.sorted_ids = bad.num_post_padded = bad.expert_offsets = NULL);
    REFUSES(cannot, "routing at once has no kernel on this backend", bad.topk.num_tokens = 0; bad.x = NULL);
    close_case(&c);
}

/* What the kernels rely on, over all sizes that a layer may have. */
Test(route, sizes)
{
    static const int32_t experts[] = {1, 7, 8, 64, 256, 257, 384, 512, 513, 4096};
    static const int32_t tokens[] = {0, 1, 31, 32, 33, 4095, 4096, 4097, 65536, 1 << 20};
    for (size_t e = 0; e < sizeof experts / sizeof experts[0]; e++) {
        int64_t counts = epmoei_route_counts_bytes(experts[e]), before = 0;
        cr_assert_eq(counts % EPMOEI_ALIGNMENT, 0);
        cr_assert_eq(counts == 0, experts[e] > 512, "%d experts: %lld bytes", experts[e], (long long)counts);
        for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
            epmoei_route_groups_t groups = epmoei_route_groups(tokens[t], experts[e]);
            const int64_t covered = (int64_t)groups.count << groups.shift;
            cr_assert(groups.shift >= 5 && groups.count <= 128, "%d groups of 1 << %d", groups.count, groups.shift);
            cr_assert(covered >= tokens[t] && covered - tokens[t] < (int64_t)1 << groups.shift);
            cr_assert(groups.stride % 4 == 0 && 2 * groups.stride >= experts[e] && 2 * groups.stride < experts[e] + 8);
            if (counts) cr_assert_leq((int64_t)groups.count * groups.stride * 4, counts);
            /* A group's size fits the 16 bits in which its tokens are counted. */
            if (epmoei_route_aligns(tokens[t], experts[e], 1))
                cr_assert(counts > 0 && (1 << groups.shift) <= INT16_MAX);
            else
                cr_assert(experts[e] > 512 || ((int64_t)experts[e] << groups.shift) > 8192 * 32);

            /* The workspace holds the counts and the partial logits of a chunk, 32 MiB at most beyond one tile. */
            epmoei_router_parts_t parts = epmoei_router_parts(4096, experts[e]);
            int64_t row_bytes = (int64_t)parts.num_parts * parts.row_stride * 4;
            int32_t chunk = epmoei_route_chunk(tokens[t], experts[e], 4096);
            int64_t bytes = epmoei_route_workspace(tokens[t], experts[e], 4096);
            cr_assert(chunk <= tokens[t] && (chunk == tokens[t] || chunk % 128 == 0) && (chunk > 0) == (tokens[t] > 0));
            cr_assert(chunk <= 128 || chunk * row_bytes <= 32 << 20);
            cr_assert_eq(bytes, counts + chunk * row_bytes);
            cr_assert_geq(bytes, before, "%d tokens take less than fewer", tokens[t]);
            before = bytes;
        }
    }
    /* Hand-worked: a hundred tokens of 8 experts are 4 groups of 32, of 4 words; 2^31 slots are too many. */
    epmoei_route_groups_t groups = epmoei_route_groups(100, 8);
    cr_assert(groups.count == 4 && groups.shift == 5 && groups.stride == 4);
    cr_assert_eq(epmoei_route_counts_bytes(8), 128 * 4 * 4);
    cr_assert(epmoei_route_aligns(100, 8, 2) && !epmoei_route_aligns(100, 513, 2));
    cr_assert(!epmoei_route_aligns(1 << 30, 8, 2));
    /* What the kernel's int32 products rely on: 128 groups of 2^14 tokens at most, however few experts there are. */
    for (int32_t e = 1; e <= 512; e++) {
        const int32_t slots = epmoei_min64(e, EPMOE_MAX_TOP_K - 1) + 1;
        cr_assert_eq(epmoei_route_aligns(1 << 21, e, slots), e <= 16, "%d experts", e);
        for (int32_t t = (1 << 21) + 1; t > 0; t = t < INT32_MAX / 2 ? 2 * t : t < INT32_MAX ? INT32_MAX : 0)
            cr_assert(!epmoei_route_aligns(t, e, 1), "%d tokens, %d experts", t, e);
    }
}
