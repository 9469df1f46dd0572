/* Rows that lie 2^31 elements and more apart, op by op on the CPU: what they give is what neighbouring rows give.
 * Memory is mapped and mostly never touched, or only read, which takes no page of its own. */
#include "dense_layers/linear_op.h"
#include "dense_layers/qk_norm_rope.h"
#include "dense_layers/rms_norm.h"
#include "dense_layers/rope.h"
#include "dense_layers/sample.h"
#include "kernels/permute.h"
#include "kernels/quantize_fp8.h"
#include "kernels/sum.h"
#include "kernels/topk.h"
#include "tests/op_testing.h"
#include "tests/quant_case.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { kCols = 256, kRows = 2 };

static const int64_t kStride = ((int64_t)1 << 31) + 24;

/* Of `bytes`, and zero. */
static void *sparse(int64_t bytes)
{
    void *data = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) cr_skip_test("no address space for %lld bytes", (long long)bytes);
    madvise(data, (size_t)bytes, MADV_HUGEPAGE); /* fewer faults; not everywhere */
    return data;
}

static void drop(void *data, int64_t bytes) { munmap(data, (size_t)bytes); }

/* A matrix of bf16 or bytes twice: rows side by side, and rows kStride apart. */
typedef struct rows_t {
    char *near, *far;
    int64_t row_bytes, far_bytes, stride_bytes;
} rows_t;

static rows_t make_rows(testing_rng_t *rng, int32_t size)
{
    rows_t rows = {.row_bytes = kCols * size, .stride_bytes = kStride * size};
    rows.far_bytes = (kRows - 1) * rows.stride_bytes + rows.row_bytes;
    rows.near = calloc(kRows, (size_t)rows.row_bytes);
    rows.far = sparse(rows.far_bytes);
    if (!rng) return rows;
    testing_fill_normal(rng, rows.near, EPMOE_BF16, kRows * kCols, 1);
    for (int64_t r = 0; r < kRows; r++)
        memcpy(rows.far + r * rows.stride_bytes, rows.near + r * rows.row_bytes, (size_t)rows.row_bytes);
    return rows;
}

static void expect_equal(const rows_t *rows, const char *what)
{
    bool zero = true;
    for (int64_t i = 0; i < kRows * rows->row_bytes; i++) zero &= !rows->near[i];
    cr_assert_not(zero, "%s was not written", what);
    for (int64_t r = 0; r < kRows; r++)
        cr_assert_eq(
            memcmp(rows->far + r * rows->stride_bytes, rows->near + r * rows->row_bytes, (size_t)rows->row_bytes), 0,
            "row %d of %s", (int)r, what);
}

static void free_rows(rows_t *rows)
{
    free(rows->near);
    drop(rows->far, rows->far_bytes);
}

/* The op, or its reference kernel on arguments that its check has filled in. */
#define RUN(op, op_check, op_ref, args, reference)                                                                     \
    do {                                                                                                               \
        __typeof__(args) own_;                                                                                         \
        cr_assert_eq(op_check(&(args), &own_), EPMOE_OK, "%s", epmoe_last_error());                                    \
        cr_assert_eq((reference) ? op_ref(&own_, NULL) : op(&(args), NULL), EPMOE_OK, "%s", epmoe_last_error());       \
    } while (0)

Test(large_offsets, topk_and_sample)
{
    testing_rng_t rng = testing_rng(testing_seed());
    rows_t logits = make_rows(&rng, 2);
    for (int reference = 0; reference < 2; reference++) {
        int32_t ids[2][kRows * 3], tokens[2][kRows];
        float weights[2][kRows * 3];
        const float uniform[kRows] = {0.3f, 0.8f};
        for (int far = 0; far < 2; far++) {
            epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
            topk.backend = EPMOE_BACKEND_CPU;
            topk.num_tokens = kRows, topk.num_experts = kCols, topk.top_k = 3, topk.logits_dtype = EPMOE_BF16;
            topk.logits = far ? logits.far : logits.near, topk.logits_stride = far ? kStride : 0;
            topk.ids = ids[far], topk.weights = weights[far];
            RUN(epmoe_topk, epmoei_topk_check, epmoei_topk_ref, topk, reference);
            epmoe_sample_args_t sample = EPMOE_SAMPLE_ARGS_INIT;
            sample.backend = EPMOE_BACKEND_CPU;
            sample.num_rows = kRows, sample.vocab_size = kCols, sample.logits_dtype = EPMOE_BF16;
            sample.logits = topk.logits, sample.logits_stride = topk.logits_stride;
            sample.uniform = uniform, sample.temperature = 1, sample.tokens = tokens[far];
            RUN(epmoe_sample, epmoei_sample_check, epmoei_sample_ref, sample, reference);
        }
        cr_assert_arr_eq(ids[0], ids[1], sizeof ids[0]);
        cr_assert_arr_eq(weights[0], weights[1], sizeof weights[0]);
        cr_assert_arr_eq(tokens[0], tokens[1], sizeof tokens[0]);
    }
    free_rows(&logits);
}

Test(large_offsets, rms_norm)
{
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t weight[kCols];
    testing_fill_normal(&rng, weight, EPMOE_BF16, kCols, 1);
    for (int reference = 0; reference < 2; reference++) {
        rows_t x = make_rows(&rng, 2), residual = make_rows(&rng, 2), y = make_rows(NULL, 2);
        for (int far = 0; far < 2; far++) {
            epmoe_rms_norm_args_t args = EPMOE_RMS_NORM_ARGS_INIT;
            args.backend = EPMOE_BACKEND_CPU;
            args.num_tokens = kRows, args.hidden = kCols, args.dtype = EPMOE_BF16, args.weight = weight;
            args.x = far ? x.far : x.near, args.y = far ? y.far : y.near;
            args.residual = far ? residual.far : residual.near;
            args.x_stride = args.y_stride = args.residual_stride = far ? kStride : 0;
            RUN(epmoe_rms_norm, epmoei_rms_norm_check, epmoei_rms_norm_ref, args, reference);
        }
        expect_equal(&y, "y"), expect_equal(&residual, "residual");
        free_rows(&x), free_rows(&residual), free_rows(&y);
    }
}

Test(large_offsets, rope)
{
    enum { kHead = 64, kHeads = kCols / kHead };
    testing_rng_t rng = testing_rng(testing_seed());
    const int64_t positions[kRows] = {3, 5};
    float table[6 * kHead];
    uint16_t weight[kHead];
    testing_fill_normal(&rng, weight, EPMOE_BF16, kHead, 1);
    epmoe_rope_table_args_t make = EPMOE_ROPE_TABLE_ARGS_INIT;
    make.num_positions = 6, make.rotary_dim = kHead, make.cos_sin = table;
    cr_assert_eq(epmoe_rope_table(&make), EPMOE_OK);
    for (int reference = 0; reference < 2; reference++) {
        rows_t q = make_rows(&rng, 2), k = make_rows(&rng, 2), qkv = make_rows(&rng, 2);
        for (int far = 0; far < 2; far++) {
            epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
            rope.backend = EPMOE_BACKEND_CPU;
            rope.num_tokens = kRows, rope.num_heads = rope.num_kv_heads = kHeads, rope.head_dim = kHead;
            rope.dtype = EPMOE_BF16, rope.positions = positions, rope.cos_sin = table, rope.num_positions = 6;
            rope.q = far ? q.far : q.near, rope.k = far ? k.far : k.near;
            rope.q_stride = rope.k_stride = far ? kStride : 0;
            RUN(epmoe_rope, epmoei_rope_check, epmoei_rope_ref, rope, reference);
            epmoe_qk_norm_rope_args_t norm = EPMOE_QK_NORM_ROPE_ARGS_INIT;
            norm.backend = EPMOE_BACKEND_CPU;
            norm.num_tokens = kRows, norm.num_heads = kHeads - 2, norm.num_kv_heads = 1, norm.head_dim = kHead;
            norm.dtype = EPMOE_BF16, norm.positions = positions, norm.cos_sin = table, norm.num_positions = 6;
            norm.q_weight = norm.k_weight = weight;
            norm.qkv = far ? qkv.far : qkv.near, norm.qkv_stride = far ? kStride : 0;
            RUN(epmoe_qk_norm_rope, epmoei_qk_norm_rope_check, epmoei_qk_norm_rope_ref, norm, reference);
        }
        expect_equal(&q, "q"), expect_equal(&k, "k"), expect_equal(&qkv, "qkv");
        free_rows(&q), free_rows(&k), free_rows(&qkv);
    }
}

Test(large_offsets, quantize_fp8)
{
    testing_rng_t rng = testing_rng(testing_seed());
    rows_t x = make_rows(&rng, 2);
    for (int reference = 0; reference < 2; reference++)
        for (int granularity = EPMOE_GRANULARITY_TENSOR; granularity <= EPMOE_GRANULARITY_BLOCK128; granularity++) {
            uint8_t codes[2][kRows * kCols];
            float scales[2][kRows * 2] = {{0}};
            for (int far = 0; far < 2; far++) {
                epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
                args.backend = EPMOE_BACKEND_CPU;
                args.num_tokens = kRows, args.hidden = kCols, args.dtype = EPMOE_BF16;
                args.granularity = (epmoe_granularity_t)granularity;
                args.x = far ? x.far : x.near, args.x_stride = far ? kStride : 0;
                args.q = codes[far], args.scale = scales[far];
                RUN(epmoe_quantize_fp8, epmoei_quantize_fp8_check, epmoei_quantize_fp8_ref, args, reference);
            }
            cr_assert_arr_eq(codes[0], codes[1], sizeof codes[0]);
            cr_assert_arr_eq(scales[0], scales[1], sizeof scales[0]);
        }
    free_rows(&x);
}

/* 2^21 + 1 rows of 2^10 columns, of which the last is used. */
Test(large_offsets, permute_and_unpermute)
{
    enum { kMany = (1 << 21) + 1, kWide = 1 << 10, kLast = kMany - 1 };
    const int64_t bytes = (int64_t)kMany * kWide * 2;
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t *rows = sparse(bytes), *last = rows + (int64_t)kLast * kWide, got[kWide];
    testing_fill_normal(&rng, last, EPMOE_BF16, kWide, 1);
    const int32_t id = kLast, one = 1;
    for (int reference = 0; reference < 2; reference++) {
        epmoe_permute_args_t permute = EPMOE_PERMUTE_ARGS_INIT;
        permute.backend = EPMOE_BACKEND_CPU;
        permute.num_tokens = kMany, permute.top_k = 1, permute.hidden = kWide, permute.dtype = EPMOE_BF16;
        permute.x = rows, permute.sorted_ids = &id, permute.num_rows = &one, permute.max_rows = 1, permute.y = got;
        memset(got, 0, sizeof got);
        RUN(epmoe_permute, epmoei_permute_check, epmoei_permute_ref, permute, reference);
        cr_assert_arr_eq(got, last, sizeof got);
        epmoe_unpermute_args_t back = EPMOE_UNPERMUTE_ARGS_INIT;
        back.backend = EPMOE_BACKEND_CPU;
        back.num_tokens = 1, back.top_k = 1, back.hidden = kWide, back.dtype = EPMOE_BF16;
        back.y = rows, back.max_rows = kMany, back.inverse = &id, back.out = got;
        memset(got, 0, sizeof got);
        RUN(epmoe_unpermute, epmoei_unpermute_check, epmoei_unpermute_ref, back, reference);
        cr_assert_arr_eq(got, last, sizeof got);
    }
    drop(rows, bytes);
}

/* Slots of 32 rows of 2^10 columns per token, of which the last token uses its last one. */
Test(large_offsets, sum)
{
    enum { kTokens = (1 << 16) + 1, kSlots = 32, kWide = 1 << 10 };
    const int64_t bytes = (int64_t)kTokens * kSlots * kWide * 2, out_bytes = (int64_t)kTokens * kWide * 2;
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t *y = sparse(bytes), *last = y + ((int64_t)kTokens * kSlots - 1) * kWide, *out = sparse(out_bytes);
    int32_t *ids = malloc((size_t)kTokens * kSlots * 4);
    memset(ids, 0xFF, (size_t)kTokens * kSlots * 4);
    ids[(int64_t)kTokens * kSlots - 1] = 0;
    testing_fill_normal(&rng, last, EPMOE_BF16, kWide, 1);
    epmoe_sum_args_t args = EPMOE_SUM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = kTokens, args.top_k = kSlots, args.hidden = kWide, args.y_dtype = EPMOE_BF16;
    args.y = y, args.ids = ids, args.out = out;
    RUN(epmoe_sum, epmoei_sum_check, epmoei_sum_ref, args, false);
    cr_assert_arr_eq(out + (int64_t)(kTokens - 1) * kWide, last, kWide * 2);
    free(ids);
    drop(y, bytes), drop(out, out_bytes);
}

/* x and weights of 2^15 + 1 rows of 2^16 columns: the last row's first and last column are 1, the rest zero. */
Test(large_offsets, linear)
{
    enum { kMany = (1 << 15) + 1, kDeep = 1 << 16 };
    const int64_t bytes = (int64_t)kMany * kDeep * 2;
    uint16_t *rows = sparse(bytes), *last = rows + (int64_t)(kMany - 1) * kDeep, *one = calloc(kDeep, 2);
    last[0] = last[kDeep - 1] = one[0] = 0x3F80, one[kDeep - 1] = 0x4000;
    float *y = malloc(kMany * sizeof *y);
    for (int many_tokens = 0; many_tokens < 2; many_tokens++) {
        epmoe_linear_args_t args = EPMOE_LINEAR_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CPU;
        args.num_tokens = many_tokens ? kMany : 1, args.n = many_tokens ? 1 : kMany, args.k = kDeep;
        args.x_dtype = EPMOE_BF16, args.y_dtype = EPMOE_F32;
        args.x = many_tokens ? rows : one, args.y = y;
        args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
        args.weight.format = EPMOE_FORMAT_BF16, args.weight.data = many_tokens ? one : rows;
        cr_assert_eq(epmoe_linear_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
        void *workspace = args.workspace = malloc((size_t)args.workspace_bytes + 1);
        memset(y, 0xFF, kMany * sizeof *y);
        cr_assert_eq(epmoe_linear(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        for (int32_t i = 0; i < kMany; i++)
            cr_assert_eq(y[i], i == kMany - 1 ? 3.0f : 0.0f, "%s: y[%d] is %g", many_tokens ? "x" : "weight", i,
                         (double)y[i]);
        free(workspace);
    }
    free(y), free(one);
    drop(rows, bytes);
}

/* 1025 experts of 2^22 weights, of which the last has a row of ones: its values are 2^-7, and 2^-5 in the second half.
 */
Test(large_offsets, weights_of_the_last_expert)
{
    enum { kExperts = 1025, kN = 1 << 15, kK = 128 };
    static const epmoe_format_t formats[] = {EPMOE_FORMAT_BF16, EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_GPTQ,
                                             EPMOE_FORMAT_AWQ,  EPMOE_FORMAT_CT_W4,     EPMOE_FORMAT_W4,
                                             EPMOE_FORMAT_MXFP4};
    static const float values[] = {0x1p-7f, 0x1p-5f};
    float *y = malloc(kN * sizeof *y), x[kK];
    int32_t offsets[kExperts + 1] = {0};
    offsets[kExperts] = 1;
    for (int i = 0; i < kK; i++) x[i] = 1;
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        quant_case_t last = quant_case_constant(formats[i], 1, kN, kK, values);
        epmoei_quant_sizes_t sizes = {.data_bytes = (int64_t)kN * kK * 2};
        if (epmoei_format_is_quantised(formats[i]))
            sizes = epmoei_quant_sizes(formats[i], kN, kK, formats[i] == EPMOE_FORMAT_MXFP4 ? 32 : 128, 0);
        const int64_t scales_bytes = sizes.scales * (formats[i] == EPMOE_FORMAT_MXFP4 ? 1 : 2);
        const struct {
            const void *from;
            int64_t bytes;
        } arrays[] = {{last.data, sizes.data_bytes}, {last.scales, scales_bytes}, {last.zeros, sizes.zeros_bytes}};
        void *all[3] = {NULL};
        for (int a = 0; a < 3; a++) {
            if (!arrays[a].bytes) continue;
            all[a] = sparse(kExperts * arrays[a].bytes);
            memcpy((char *)all[a] + (kExperts - 1) * arrays[a].bytes, arrays[a].from, (size_t)arrays[a].bytes);
        }
        epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CPU;
        args.num_experts = kExperts, args.n = kN, args.k = kK, args.max_rows = 1;
        args.expert_offsets = offsets;
        args.x_dtype = args.y_dtype = EPMOE_F32;
        args.x = x, args.y = y;
        args.weight = last.weight;
        args.weight.data = all[0], args.weight.scales = all[1];
        if (last.weight.zeros) args.weight.zeros = all[2];
        args.activation = EPMOE_ACTIVATION_NONE;
        cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s",
                     epmoe_last_error());
        void *workspace = args.workspace = malloc((size_t)args.workspace_bytes + 1);
        memset(y, 0xFF, kN * sizeof *y);
        cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        for (int32_t n = 0; n < kN; n++)
            cr_assert_eq(y[n], n < kN / 2 ? 1.0f : 4.0f, "%s: y[%d] is %g", epmoe_format_string(formats[i]), n,
                         (double)y[n]);
        for (int a = 0; a < 3; a++)
            if (all[a]) drop(all[a], kExperts * arrays[a].bytes);
        free(workspace);
        quant_case_free(&last);
    }
    free(y);
}
