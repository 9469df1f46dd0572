/* Dense ops on a device at the edges of their arguments: rows and blocks 2^31 elements apart, slots of padding alone,
 * bases off their alignment. test_gpu_dense_fused has fused ops against the ops in a row. */
#include "tests/gpu_testing.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

TestSuite(gpu_dense_edges, .timeout = 300);

static void expect_same(const char *what, const void *a, const void *b, int64_t bytes)
{
    void *got = gpu_get_new(a, bytes), *expected = gpu_get_new(b, bytes);
    cr_expect(gpu_same(what, got, expected, bytes, 1, bytes), "%s", what);
    cr_expect(gpu_guards_intact(a) && gpu_guards_intact(b), "%s", what);
    free(got);
    free(expected);
}

static bool enough_memory(int64_t bytes)
{
    size_t available = 0, total = 0;
    return cudaMemGetInfo(&available, &total) == cudaSuccess && (int64_t)available > bytes + ((int64_t)1 << 30);
}

/* Two rows of bf16 or of codes, side by side and 2^31 elements apart. */
typedef struct far_rows_t {
    char *near, *far;
    int64_t row_bytes, stride_bytes;
} far_rows_t;

static far_rows_t far_rows(int64_t width, int64_t stride, int64_t size)
{
    far_rows_t rows = {.row_bytes = width * size, .stride_bytes = stride * size};
    rows.near = gpu_buffer(2 * rows.row_bytes, 0), rows.far = gpu_buffer(rows.stride_bytes + rows.row_bytes, 0);
    return rows;
}

static void far_put(const far_rows_t *rows, const char *host)
{
    gpu_put(rows->near, host, 2 * rows->row_bytes);
    for (int r = 0; r < 2; r++)
        gpu_put(rows->far + r * rows->stride_bytes, host + r * rows->row_bytes, rows->row_bytes);
}

/* The same bits in both, of which something was written. */
static void far_expect_same(const char *what, const far_rows_t *rows)
{
    cr_expect(!gpu_is_poison(rows->near, 0, rows->row_bytes), "%s was not written", what);
    for (int r = 0; r < 2; r++) {
        void *near = gpu_get_new(rows->near + r * rows->row_bytes, rows->row_bytes);
        void *far = gpu_get_new(rows->far + r * rows->stride_bytes, rows->row_bytes);
        cr_expect(gpu_same(what, far, near, rows->row_bytes, 1, rows->row_bytes), "%s, row %d", what, r);
        free(near), free(far);
    }
    cr_expect(gpu_is_poison(rows->far, rows->row_bytes, 4096), "%s: what lies behind the first row was written", what);
}

static void far_free(far_rows_t *rows)
{
    cr_expect(gpu_guards_intact(rows->near) && gpu_guards_intact(rows->far));
    gpu_buffer_free(rows->near), gpu_buffer_free(rows->far);
}

/* With and without codes as output, x, residual and y each in rows of their own. */
Test(gpu_dense_edges, norms_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kWidth = 1024 };
    const int64_t stride = (1ll << 31) + 64;
    if (!enough_memory(8 * stride))
        GPU_TEST_SKIP("fewer than %lld bytes are free on the device", (long long)(8 * stride));
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t x[2 * kWidth], residual[2 * kWidth], weight[kWidth];
    testing_fill_normal(&rng, x, EPMOE_BF16, 2 * kWidth, 2);
    testing_fill_normal(&rng, residual, EPMOE_BF16, 2 * kWidth, 2);
    testing_fill_normal(&rng, weight, EPMOE_BF16, kWidth, 1);
    far_rows_t inputs = far_rows(kWidth, stride, 2), sums = far_rows(kWidth, stride, 2);
    void *weights = gpu_copy_of(weight, sizeof weight), *scales[2] = {gpu_buffer(64, 0), gpu_buffer(64, 0)};
    far_put(&inputs, (const char *)x);
    static const epmoe_granularity_t quants[] = {0, EPMOE_GRANULARITY_TOKEN, EPMOE_GRANULARITY_BLOCK128};
    for (int q = 0; q < 3; q++) {
        far_rows_t outputs = far_rows(kWidth, stride, quants[q] ? 1 : 2);
        far_put(&sums, (const char *)residual);
        for (int far = 0; far < 2; far++) {
            epmoe_rms_norm_args_t args = EPMOE_RMS_NORM_ARGS_INIT;
            args.backend = EPMOE_BACKEND_CUDA, args.num_tokens = 2, args.hidden = kWidth, args.dtype = EPMOE_BF16;
            args.x = far ? inputs.far : inputs.near, args.residual = far ? sums.far : sums.near;
            args.y = far ? outputs.far : outputs.near, args.weight = weights;
            args.x_stride = args.residual_stride = args.y_stride = far ? stride : 0;
            args.quant = quants[q], args.scale = quants[q] ? scales[far] : NULL;
            cr_assert_eq(epmoe_rms_norm(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert(gpu_wait());
        }
        far_expect_same("y", &outputs), far_expect_same("the sum", &sums);
        if (quants[q]) expect_same("scales", scales[1], scales[0], quants[q] == EPMOE_GRANULARITY_TOKEN ? 8 : 64);
        far_free(&outputs);
    }
    far_free(&inputs), far_free(&sums);
    gpu_buffer_free(weights), gpu_buffer_free(scales[0]), gpu_buffer_free(scales[1]);
}

/* Keys and values of two tokens for a cache of 2 blocks with one slot; slots are the caller's. */
typedef struct small_rope_t {
    epmoe_rope_args_t rope;
    epmoe_cache_write_args_t cache;
    void *owned[6];
} small_rope_t;

enum { kSmallHead = 64, kSmallRow = 3 * kSmallHead };

static small_rope_t small_rope(testing_rng_t *rng, const int64_t slots[2], epmoe_dtype_t cache_dtype)
{
    const int64_t positions[2] = {1, 0};
    const float scale = 0.05f;
    float turn[2 * kSmallHead];
    uint16_t qkv[2 * kSmallRow];
    testing_fill_normal(rng, qkv, EPMOE_BF16, 2 * kSmallRow, 2);
    for (int i = 0; i < 2 * kSmallHead; i++) {
        const double angle = i / kSmallHead * 0.1 * (1 + i % (kSmallHead / 2));
        turn[i] = (float)(i % kSmallHead < kSmallHead / 2 ? cos(angle) : sin(angle));
    }
    small_rope_t s = {.rope = EPMOE_ROPE_ARGS_INIT, .cache = EPMOE_CACHE_WRITE_ARGS_INIT};
    s.owned[0] = gpu_copy_of(qkv, sizeof qkv), s.owned[1] = gpu_copy_of(positions, sizeof positions);
    s.owned[2] = gpu_copy_of(slots, 2 * sizeof slots[0]), s.owned[3] = gpu_copy_of(turn, sizeof turn);
    s.owned[4] = gpu_copy_of(&scale, sizeof scale);
    char *row = s.owned[0];
    s.rope.backend = s.cache.backend = EPMOE_BACKEND_CUDA, s.rope.num_tokens = s.cache.num_tokens = 2;
    s.rope.num_heads = s.rope.num_kv_heads = s.cache.num_kv_heads = 1;
    s.rope.head_dim = s.cache.head_dim = kSmallHead, s.rope.dtype = s.cache.dtype = EPMOE_BF16;
    s.rope.q = row, s.rope.k = row + 2 * kSmallHead, s.rope.q_stride = s.rope.k_stride = kSmallRow;
    s.rope.positions = s.owned[1], s.rope.cos_sin = s.owned[3], s.rope.num_positions = 2;
    s.cache.num_blocks = 2, s.cache.block_size = 1, s.cache.layout = EPMOE_CACHE_LAYOUT_NHD;
    s.cache.cache_dtype = cache_dtype, s.cache.slots = s.owned[2];
    s.cache.value = row + 4 * kSmallHead, s.cache.value_stride = kSmallRow;
    if (cache_dtype == EPMOE_F8_E4M3) s.cache.k_scale = s.cache.v_scale = s.owned[4];
    return s;
}

static void small_rope_free(small_rope_t *s)
{
    for (int i = 0; i < 5; i++) gpu_buffer_free(s->owned[i]);
}

/* Blocks of E4M3 that lie 2^31 elements apart; the second token's slot is the first. */
Test(gpu_dense_edges, e4m3_blocks_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    const int64_t stride = (1ll << 31) + 64, slots[2] = {1, 0};
    if (!enough_memory(2 * stride))
        GPU_TEST_SKIP("fewer than %lld bytes are free on the device", (long long)(2 * stride));
    far_rows_t keys = far_rows(kSmallHead, stride, 1), values = far_rows(kSmallHead, stride, 1);
    for (int far = 0; far < 2; far++) {
        testing_rng_t rng = testing_rng(17);
        small_rope_t s = small_rope(&rng, slots, EPMOE_F8_E4M3);
        s.cache.key_cache = far ? keys.far : keys.near, s.cache.value_cache = far ? values.far : values.near;
        s.cache.key_block_stride = s.cache.value_block_stride = far ? stride : kSmallHead;
        cr_assert_eq(epmoe_rope_cache_write(&s.rope, &s.cache, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(gpu_wait());
        small_rope_free(&s);
    }
    far_expect_same("keys", &keys), far_expect_same("values", &values);
    far_free(&keys), far_free(&values);
}

/* Padding is rotated as by the op alone, and cached nowhere. */
Test(gpu_dense_edges, slots_of_padding_alone)
{
    GPU_TEST_NEEDS_DEVICE();
    const int64_t slots[2] = {-1, -1};
    for (int fp8 = 0; fp8 < 2; fp8++) {
        small_rope_t pair[2];
        void *keys = gpu_buffer(4 * kSmallHead, 0), *values = gpu_buffer(4 * kSmallHead, 0);
        for (int i = 0; i < 2; i++) {
            testing_rng_t rng = testing_rng(18);
            pair[i] = small_rope(&rng, slots, fp8 ? EPMOE_F8_E4M3 : EPMOE_BF16);
            pair[i].cache.key_cache = keys, pair[i].cache.value_cache = values;
            cr_assert_eq(i ? epmoe_rope_cache_write(&pair[i].rope, &pair[i].cache, gpu_stream())
                           : epmoe_rope(&pair[i].rope, gpu_stream()),
                         EPMOE_OK, "%s", epmoe_last_error());
            cr_assert(gpu_wait());
        }
        expect_same("q, k and v", pair[1].owned[0], pair[0].owned[0], 4 * kSmallRow);
        cr_expect(gpu_is_poison(keys, 0, 4 * kSmallHead) && gpu_is_poison(values, 0, 4 * kSmallHead));
        cr_expect(gpu_guards_intact(keys) && gpu_guards_intact(values));
        gpu_buffer_free(keys), gpu_buffer_free(values);
        small_rope_free(&pair[0]), small_rope_free(&pair[1]);
    }
}

/* Each base off its alignment: refused, and q, k and the caches as they were. */
Test(gpu_dense_edges, misaligned_rope_and_cache)
{
    GPU_TEST_NEEDS_DEVICE();
    const int64_t slots[2] = {0, 1};
    testing_rng_t rng = testing_rng(testing_seed());
    small_rope_t s = small_rope(&rng, slots, EPMOE_BF16);
    char *keys = gpu_buffer(8 * kSmallHead, 0), *values = gpu_buffer(8 * kSmallHead, 0);
    void *before = gpu_get_new(s.owned[0], 4 * kSmallRow);
    s.cache.key_cache = keys, s.cache.value_cache = values;
    for (int wrong = 0; wrong < 7; wrong++) {
        epmoe_rope_args_t rope = s.rope;
        epmoe_cache_write_args_t cache = s.cache;
        if (wrong == 0) rope.q = (char *)rope.q + 8;
        if (wrong == 1) rope.k = (char *)rope.k + 2;
        if (wrong == 2) rope.positions = (const char *)rope.positions + 4;
        if (wrong == 3) cache.slots = (const char *)cache.slots + 4;
        if (wrong == 4) cache.key_cache = keys + 8;
        if (wrong == 5) cache.value_cache = values + 2;
        if (wrong == 6) cache.value = (const char *)cache.value + 8;
        const epmoe_status_t status = epmoe_rope_cache_write(&rope, &cache, gpu_stream());
        cr_expect_eq(status, EPMOE_ERROR_INVALID_ARGUMENT, "%d gave %s", wrong, epmoe_status_string(status));
        cr_assert(gpu_wait());
        void *after = gpu_get_new(s.owned[0], 4 * kSmallRow);
        cr_expect(gpu_same("q, k and v", after, before, 4 * kSmallRow, 1, 2 * kSmallRow), "%d", wrong);
        cr_expect(gpu_is_poison(keys, 0, 8 * kSmallHead) && gpu_is_poison(values, 0, 8 * kSmallHead), "%d", wrong);
        free(after);
    }
    cr_expect_eq(epmoe_rope_cache_write(&s.rope, &s.cache, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    free(before);
    small_rope_free(&s);
    gpu_buffer_free(keys), gpu_buffer_free(values);
}
