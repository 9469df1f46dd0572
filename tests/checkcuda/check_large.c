/* Rows beyond 2^31 elements, without as much host memory: only the rows that count are sent and fetched. */
#include "base/dtype.h"
#include "tests/checkcuda/check.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

static char *device_buffer(int64_t bytes)
{
    void *data;
    if (epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &data, bytes, "a large check") == EPMOE_OK) return data;
    check_fail(NULL, "%s", epmoe_last_error());
    check_end();
    exit(1);
}

static void copy(void *dst, const void *src, int64_t bytes)
{
    if (epmoei_memory_copy(EPMOE_BACKEND_CUDA, dst, src, bytes, check_stream) != EPMOE_OK ||
        epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream) != EPMOE_OK) {
        printf("%s\n", epmoe_last_error());
        exit(1);
    }
}

static void expect_ok(epmoe_status_t status)
{
    if (status != EPMOE_OK) check_fail(NULL, "status %d: %s", (int)status, epmoe_last_error());
}

enum { kCols = 1024 };

static void expect_row(const void *device, const uint16_t *expected, const char *what)
{
    uint16_t got[kCols];
    copy(got, device, sizeof got);
    if (memcmp(got, expected, sizeof got)) check_fail(NULL, "%s is wrong", what);
}

/* Strides put the third row 2^31 elements away. */
static void check_strides(testing_rng_t *rng)
{
    check_begin("large", "strides: topk, silu_and_mul");
    const int64_t stride = ((int64_t)1 << 30) + 8;
    char *x = device_buffer((2 * stride + 2 * kCols) * 2), *y = device_buffer((2 * stride + kCols) * 2);
    uint16_t row[2 * kCols], out[kCols];
    testing_fill_normal(rng, row, EPMOE_BF16, 2 * kCols, 1.0f);
    for (int32_t t = 0; t < 3; t++) copy(x + t * stride * 2, row, sizeof row);

    epmoe_silu_and_mul_args_t act = EPMOE_SILU_AND_MUL_ARGS_INIT;
    act.backend = EPMOE_BACKEND_CUDA;
    act.num_tokens = 3;
    act.width = kCols;
    act.dtype = EPMOE_BF16;
    act.x = x, act.y = y;
    act.x_stride = act.y_stride = stride;
    expect_ok(epmoe_silu_and_mul(&act, check_stream));
    copy(out, y, sizeof out);
    expect_row(y + 2 * stride * 2, out, "row 2 of silu_and_mul");
    if (!memcmp(out, row, sizeof out)) check_fail(NULL, "silu_and_mul did nothing");

    int32_t *ids = (int32_t *)(void *)y, got[6];
    float *weights = (float *)(void *)(y + 256);
    epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
    topk.backend = EPMOE_BACKEND_CUDA;
    topk.num_tokens = 3;
    topk.num_experts = kCols;
    topk.top_k = 2;
    topk.logits_dtype = EPMOE_BF16;
    topk.logits = x;
    topk.logits_stride = stride;
    topk.ids = ids, topk.weights = weights;
    expect_ok(epmoe_topk(&topk, check_stream));
    copy(got, ids, sizeof got);
    if (got[0] != got[4] || got[1] != got[5] || got[0] == got[1]) check_fail(NULL, "row 2 of topk is wrong");
    epmoei_memory_free(EPMOE_BACKEND_CUDA, x);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, y);
    check_end();
}

/* The same for the dense ops: rows of tokens, blocks of a cache. */
static void check_dense_strides(testing_rng_t *rng)
{
    check_begin("large", "strides: rms_norm, rope, cache_write");
    const int64_t stride = ((int64_t)1 << 30) + 8, bytes = (2 * stride + kCols) * 2;
    char *x = device_buffer(bytes), *y = device_buffer(bytes), *small = device_buffer(3 * kCols * 2 + 1024 + 4096);
    char *indices = small + 3 * kCols * 2, *table = indices + 1024;
    uint16_t row[kCols], out[kCols];
    const int64_t positions[] = {1, 1, 1}, slots[] = {0, 1, 2};
    const float turn[2] = {0.6f, 0.8f};
    testing_fill_normal(rng, row, EPMOE_BF16, kCols, 1.0f);
    for (int32_t t = 0; t < 3; t++) copy(x + t * stride * 2, row, sizeof row);
    for (int32_t t = 0; t < 3; t++) copy(small + t * (int64_t)sizeof row, row, sizeof row);

    epmoe_rms_norm_args_t norm = EPMOE_RMS_NORM_ARGS_INIT;
    norm.backend = EPMOE_BACKEND_CUDA;
    norm.num_tokens = 3, norm.hidden = kCols, norm.dtype = EPMOE_BF16;
    norm.x = x, norm.weight = small, norm.y = y;
    norm.x_stride = norm.y_stride = stride;
    expect_ok(epmoe_rms_norm(&norm, check_stream));
    copy(out, y, sizeof out);
    expect_row(y + 2 * stride * 2, out, "row 2 of rms_norm");
    if (!memcmp(out, row, sizeof out)) check_fail(NULL, "rms_norm did nothing");

    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    rope.backend = EPMOE_BACKEND_CUDA;
    rope.num_tokens = 3, rope.num_heads = kCols / 128, rope.head_dim = 128, rope.dtype = EPMOE_BF16;
    rope.num_positions = 2;
    rope.q = x, rope.q_stride = stride;
    rope.positions = indices, rope.cos_sin = (const float *)(const void *)table;
    for (int32_t half = 0; half < 2; half++)
        for (int32_t i = 0; i < 64; i++) copy(table + (128 + half * 64 + i) * 4, &turn[half], 4);
    copy(indices, positions, sizeof positions);
    expect_ok(epmoe_rope(&rope, check_stream));
    copy(out, x, sizeof out);
    expect_row(x + 2 * stride * 2, out, "row 2 of rope");
    if (!memcmp(out, row, sizeof out)) check_fail(NULL, "rope did nothing");

    epmoe_cache_write_args_t cache = EPMOE_CACHE_WRITE_ARGS_INIT;
    cache.backend = EPMOE_BACKEND_CUDA;
    cache.num_tokens = 3, cache.num_kv_heads = 2, cache.head_dim = kCols / 2, cache.dtype = EPMOE_BF16;
    cache.num_blocks = 3, cache.block_size = 1, cache.layout = EPMOE_CACHE_LAYOUT_NHD;
    cache.key = cache.value = small, cache.slots = indices;
    cache.key_cache = x, cache.value_cache = y;
    cache.key_block_stride = cache.value_block_stride = stride;
    copy(indices, slots, sizeof slots);
    expect_ok(epmoe_cache_write(&cache, check_stream));
    expect_row(x + 2 * stride * 2, row, "the key of slot 2");
    expect_row(y + 2 * stride * 2, row, "the value of slot 2");
    epmoei_memory_free(EPMOE_BACKEND_CUDA, x);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, y);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, small);
    check_end();
}

/* 2^21 + 3 slots of 1024 elements. */
static void check_rows(testing_rng_t *rng)
{
    enum { kTokens = (1 << 20) + 2, kTopK = 2, kSlots = kTokens * kTopK };
    check_begin("large", "rows: permute, unpermute, sum");
    char *rows = device_buffer((int64_t)kSlots * kCols * 2), *out = device_buffer((int64_t)kTokens * kCols * 2);
    int32_t *index = (int32_t *)(void *)device_buffer((int64_t)kSlots * 4), *num_rows = index, *host;
    float *weights = (float *)(void *)device_buffer((int64_t)kSlots * 4);
    uint16_t row[kCols], zero[kCols] = {0};
    testing_fill_normal(rng, row, EPMOE_BF16, kCols, 1.0f);

    /* The last slots of the last token name its own two rows; every other token has none. */
    host = malloc((size_t)kSlots * 4);
    for (int32_t s = 0; s < kSlots; s++) host[s] = s < kSlots - kTopK ? -1 : s;
    copy(index, host, (int64_t)kSlots * 4);
    const float halves[] = {0.5f, 0.5f};
    copy(weights + kSlots - 2, halves, sizeof halves);
    for (int32_t j = 1; j <= 2; j++) copy(rows + (int64_t)(kSlots - j) * kCols * 2, row, sizeof row);

    epmoe_sum_args_t sum = EPMOE_SUM_ARGS_INIT;
    sum.backend = EPMOE_BACKEND_CUDA;
    sum.num_tokens = kTokens, sum.top_k = kTopK, sum.hidden = kCols;
    sum.y_dtype = EPMOE_BF16;
    sum.y = rows, sum.weights = weights, sum.ids = index, sum.out = out;
    expect_ok(epmoe_sum(&sum, check_stream));
    expect_row(out + (int64_t)(kTokens - 1) * kCols * 2, row, "the last row of sum");
    expect_row(out + (int64_t)(kTokens - 2) * kCols * 2, zero, "the row before the last of sum");

    epmoe_unpermute_args_t back = EPMOE_UNPERMUTE_ARGS_INIT;
    back.backend = EPMOE_BACKEND_CUDA;
    back.num_tokens = kTokens, back.top_k = kTopK, back.hidden = kCols;
    back.dtype = EPMOE_BF16;
    back.y = rows, back.max_rows = kSlots, back.inverse = index, back.weights = weights, back.out = out;
    expect_ok(epmoei_memory_set(EPMOE_BACKEND_CUDA, out, 0xFF, (int64_t)kTokens * kCols * 2, check_stream));
    expect_ok(epmoe_unpermute(&back, check_stream));
    expect_row(out + (int64_t)(kTokens - 1) * kCols * 2, row, "the last row of unpermute");
    expect_row(out, zero, "the first row of unpermute");

    /* Permute: all rows but the last are padding. */
    epmoe_permute_args_t permute = EPMOE_PERMUTE_ARGS_INIT;
    permute.backend = EPMOE_BACKEND_CUDA;
    permute.num_tokens = kTokens, permute.top_k = kTopK, permute.hidden = kCols;
    permute.dtype = EPMOE_BF16;
    for (int32_t s = 0; s < kSlots; s++) host[s] = s == kSlots - 1 ? kSlots - 1 : kSlots;
    copy(index, host, (int64_t)kSlots * 4);
    num_rows = (int32_t *)(void *)weights;
    const int32_t all = kSlots;
    copy(num_rows, &all, 4);
    permute.x = out, permute.sorted_ids = index, permute.num_rows = num_rows, permute.max_rows = kSlots;
    permute.y = rows;
    copy(out + (int64_t)(kTokens - 1) * kCols * 2, row, sizeof row);
    expect_ok(epmoe_permute(&permute, check_stream));
    expect_row(rows + (int64_t)(kSlots - 1) * kCols * 2, row, "the last row of permute");
    expect_row(rows + (int64_t)(kSlots - 2) * kCols * 2, zero, "the row before the last of permute");

    free(host);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, rows);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, out);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, index);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, weights);
    check_end();
}

/* Row 1525201 of 2816 outputs begins past 2^32 elements: bf16's 0.74609375 (two bytes of 0x3F) times sums of 1. */
static void check_w4_rows(void)
{
    enum { kRows = 1525202, kN = 2816, kK = 64 };
    check_begin("large", "rows: grouped_gemm of w4");
    uint32_t *codes = malloc(kN * kK / 2);
    uint16_t *scales = malloc(kN * 2), *row = malloc(kN * 2), one;
    if (!codes || !scales || !row) exit(1);
    for (int32_t i = 0; i < kN * kK / 8; i++) codes[i] = 0x99999999u;
    for (int32_t i = 0; i < kN; i++) epmoei_store(scales, EPMOE_BF16, i, 0x1p-6f);
    epmoe_pack_tiles_args_t pack = EPMOE_PACK_TILES_ARGS_INIT;
    epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
    pack.backend = EPMOE_BACKEND_CPU;
    pack.n = kN, pack.k = kK;
    pack.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    pack.weight.format = EPMOE_FORMAT_W4, pack.weight.group_size = kK, pack.weight.scales_dtype = EPMOE_BF16;
    pack.weight.data = codes, pack.weight.scales = scales;
    expect_ok(epmoe_pack_tiles_size(&pack, &size));
    pack.data = malloc((size_t)size.data_bytes), pack.scales = malloc((size_t)size.scales_bytes);
    expect_ok(epmoe_pack_tiles(&pack, NULL));
    const int64_t y_bytes = ((int64_t)kRows + 1) * kN * 2; /* a row more that nobody writes */
    char *data = device_buffer(size.data_bytes), *tile_scales = device_buffer(size.scales_bytes);
    char *x = device_buffer((int64_t)kRows * kK * 2), *y = device_buffer(y_bytes);
    copy(data, pack.data, size.data_bytes), copy(tile_scales, pack.scales, size.scales_bytes);
    expect_ok(epmoei_memory_set(EPMOE_BACKEND_CUDA, x, 0x3F, (int64_t)kRows * kK * 2, check_stream));
    expect_ok(epmoei_memory_set(EPMOE_BACKEND_CUDA, y, 0xFF, y_bytes, check_stream));

    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = EPMOE_BACKEND_CUDA;
    gemm.num_experts = 1, gemm.n = kN, gemm.k = kK, gemm.max_rows = kRows;
    gemm.x_dtype = gemm.y_dtype = EPMOE_BF16;
    gemm.x = x, gemm.y = y;
    gemm.weight = size.tiles;
    gemm.weight.data = data, gemm.weight.scales = tile_scales;
    gemm.layout = EPMOE_LAYOUT_PACKED, gemm.activation = EPMOE_ACTIVATION_NONE;
    expect_ok(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes));
    char *workspace = gemm.workspace_bytes ? device_buffer(gemm.workspace_bytes) : NULL;
    gemm.workspace = workspace;
    expect_ok(epmoe_grouped_gemm(&gemm, check_stream));
    const int32_t places[] = {0, 7, kRows / 2, 1525201 - 1, 1525201, kRows};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        copy(row, y + (int64_t)places[i] * kN * 2, kN * 2);
        one = places[i] == kRows ? 0xFFFF : 0x3F3F;
        for (int32_t c = 0; c < kN; c++)
            if (row[c] != one) {
                check_fail(NULL, "row %d, column %d is %04x, not %04x", places[i], c, row[c], one);
                break;
            }
    }
    free(codes), free(scales), free(row), free(pack.data), free(pack.scales);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, data), epmoei_memory_free(EPMOE_BACKEND_CUDA, tile_scales);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, x), epmoei_memory_free(EPMOE_BACKEND_CUDA, y);
    if (workspace) epmoei_memory_free(EPMOE_BACKEND_CUDA, workspace);
    check_end();
}

void check_large(testing_rng_t *rng)
{
    const size_t needed = (size_t)12 << 30;
    size_t free_bytes = 0, total = 0;
    if (check_small) return;
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess || free_bytes < needed) {
        printf("skip  large          needs 12 GiB of free device memory, %zu MiB are there\n", free_bytes >> 20);
        return;
    }
    check_strides(rng);
    check_dense_strides(rng);
    check_rows(rng);
    check_w4_rows();
}
