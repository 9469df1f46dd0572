/* Fused dense ops on a device against the ops in a row, bit for bit: RoPE with the cache write, SwiGLU with E4M3
 * output, projections that quantise x. The ops alone are tested against their references by checkcuda. */
#include "base/dtype.h"
#include "dense_layers/self_attention_cuda.h"
#include "tests/gpu_testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

TestSuite(gpu_dense_fused, .timeout = 300);

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

/* Random values on the device, the same in both buffers. */
static void make_twins(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, void *twins[2])
{
    int64_t bytes = n * epmoe_dtype_size(dtype);
    void *host = malloc((size_t)bytes + 1);
    testing_fill_normal(rng, host, dtype, n, 3);
    for (int i = 0; i < 2; i++) twins[i] = gpu_copy_of(host, bytes);
    free(host);
}

static void expect_same(const char *what, const void *a, const void *b, int64_t bytes)
{
    void *got = gpu_get_new(a, bytes), *expected = gpu_get_new(b, bytes);
    cr_assert(gpu_same(what, got, expected, bytes, 1, bytes), "%s", what);
    cr_assert(gpu_guards_intact(a) && gpu_guards_intact(b), "%s", what);
    free(got);
    free(expected);
}

/* ----------------------------------------------------------------------------------------------- rope_cache_write */

typedef struct shape_t {
    int32_t tokens, heads, kv_heads, head, rotary, block, pack, gap; /* gap: columns between the rows of qkv */
    bool mla;                                                        /* keys alone */
} shape_t;

enum { kPositions = 300 };

static void check_rope_cache(testing_rng_t *rng, const shape_t *s, epmoe_dtype_t dtype, epmoe_cache_layout_t layout,
                             bool fp8)
{
    char what[160];
    int64_t size = epmoe_dtype_size(dtype), width = (int64_t)(s->heads + 2 * s->kv_heads) * s->head + s->gap;
    int32_t blocks = (int32_t)epmoei_ceil_div(2 * (int64_t)s->tokens + 1, s->block);
    int64_t cache_bytes = (int64_t)blocks * s->block * s->kv_heads * s->head * (fp8 ? 1 : size);
    const epmoe_rope_style_t style = (epmoe_rope_style_t)testing_range(rng, 0, 1);
    const bool narrow = testing_range(rng, 0, 1);
    snprintf(what, sizeof what, "T %d heads %d+%d of %d, %d turn, style %d, %s%s, layout %d, gap %d, block %d",
             s->tokens, s->heads, s->kv_heads, s->head, s->rotary, (int)style, epmoe_dtype_string(dtype),
             fp8 ? " to e4m3" : "", (int)layout, s->gap, s->block);
    void *qkv[2], *key[2], *value[2];
    make_twins(rng, dtype, s->tokens * width, qkv);
    int64_t *positions = malloc((size_t)s->tokens * 8), *slots = malloc((size_t)s->tokens * 8);
    for (int32_t t = 0; t < s->tokens; t++) {
        int64_t position = testing_range(rng, 0, kPositions - 1), slot = t % 5 == 3 ? -1 : 2 * (int64_t)t + t % 2;
        if (narrow)
            ((int32_t *)positions)[t] = (int32_t)position, ((int32_t *)slots)[t] = (int32_t)slot;
        else
            positions[t] = position, slots[t] = slot;
    }
    float *table = malloc((size_t)kPositions * (size_t)s->rotary * 4), scales[] = {0.03f, 0.7f};
    epmoe_rope_table_args_t made = EPMOE_ROPE_TABLE_ARGS_INIT;
    made.num_positions = kPositions, made.rotary_dim = s->rotary, made.cos_sin = table;
    cr_assert_eq(epmoe_rope_table(&made), EPMOE_OK);
    void *on_device[] = {gpu_copy_of(positions, s->tokens * 8), gpu_copy_of(slots, s->tokens * 8),
                         gpu_copy_of(table, (int64_t)kPositions * s->rotary * 4), gpu_copy_of(&scales[0], 4),
                         gpu_copy_of(&scales[1], 4)};
    for (int i = 0; i < 2; i++) {
        key[i] = gpu_buffer(cache_bytes, 0), value[i] = gpu_buffer(cache_bytes, 0);
        epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
        rope.backend = EPMOE_BACKEND_CUDA, rope.num_tokens = s->tokens;
        rope.num_heads = s->heads, rope.num_kv_heads = s->kv_heads, rope.head_dim = s->head;
        rope.rotary_dim = s->rotary, rope.style = style, rope.dtype = dtype;
        rope.q = qkv[i], rope.q_stride = width;
        rope.k = (char *)qkv[i] + (int64_t)s->heads * s->head * size, rope.k_stride = width;
        rope.positions = on_device[0], rope.positions_dtype = narrow ? EPMOE_I32 : EPMOE_I64;
        rope.cos_sin = on_device[2], rope.num_positions = kPositions;
        epmoe_cache_write_args_t cache = EPMOE_CACHE_WRITE_ARGS_INIT;
        cache.backend = EPMOE_BACKEND_CUDA, cache.num_tokens = s->tokens, cache.num_kv_heads = s->kv_heads;
        cache.head_dim = s->head, cache.num_blocks = blocks, cache.block_size = s->block, cache.layout = layout;
        cache.key_pack = s->pack, cache.dtype = dtype, cache.cache_dtype = fp8 ? EPMOE_F8_E4M3 : dtype;
        if (!s->mla) {
            cache.value = (char *)rope.k + (int64_t)s->kv_heads * s->head * size, cache.value_stride = width;
            cache.value_cache = value[i];
        }
        cache.slots = on_device[1], cache.slots_dtype = rope.positions_dtype;
        cache.key_cache = key[i];
        if (fp8) cache.k_scale = on_device[3], cache.v_scale = on_device[4];
        if (i == 0) {
            cr_assert_eq(epmoe_rope(&rope, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
            cache.key = rope.k, cache.key_stride = width;
            cr_assert_eq(epmoe_cache_write(&cache, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
        } else {
            cr_assert_eq(epmoe_rope_cache_write(&rope, &cache, gpu_stream()), EPMOE_OK, "%s: %s", what,
                         epmoe_last_error());
        }
        cr_assert(gpu_wait());
    }
    expect_same(what, qkv[1], qkv[0], s->tokens * width * size);
    expect_same(what, key[1], key[0], cache_bytes);
    expect_same(what, value[1], value[0], cache_bytes);
    for (int i = 0; i < 2; i++) gpu_buffer_free(qkv[i]), gpu_buffer_free(key[i]), gpu_buffer_free(value[i]);
    for (int i = 0; i < 5; i++) gpu_buffer_free(on_device[i]);
    free(positions);
    free(slots);
    free(table);
}

/* Heads whose rows and halves are whole vectors, and others. */
Test(gpu_dense_fused, rope_and_cache_write)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    static const shape_t shapes[] = {
        {1, 32, 8, 128, 128, 16, 0, 0, false},    {16, 64, 8, 64, 64, 16, 0, 0, false},
        {65, 12, 4, 128, 64, 16, 0, 0, false},    {33, 8, 8, 96, 96, 7, 0, 8, false},
        {10, 4, 2, 80, 32, 16, 0, 0, false},      {9, 2, 1, 256, 256, 32, 0, 0, false},
        {21, 8, 4, 24, 12, 5, 4, 0, false},       {40, 8, 8, 16, 6, 3, 8, 0, false},
        {2, 1, 1, 1024, 1024, 4, 0, 0, false},    {300, 8, 2, 128, 128, 16, 0, 0, true},
        {4096, 32, 4, 128, 128, 16, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int32_t d = 0; d < 3; d++)
            for (int32_t layout = 0; layout < 3; layout++)
                for (int32_t fp8 = 0; fp8 < 2; fp8++)
                    check_rope_cache(&rng, &shapes[i], dtypes[d], (epmoe_cache_layout_t)layout, fp8);
}

/* --------------------------------------------------------------------------------------------- SwiGLU with E4M3 */

static void check_silu(testing_rng_t *rng, int32_t tokens, int32_t width, epmoe_dtype_t dtype,
                       epmoe_granularity_t quant, bool strided)
{
    char what[128];
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA, args.num_tokens = tokens, args.width = width, args.dtype = dtype;
    args.activation = (epmoe_activation_t)testing_range(rng, 0, 3);
    args.limit = testing_range(rng, 0, 1) ? 2.5f : 0;
    args.x_stride = 2 * (int64_t)width + (strided ? 8 : 0);
    int64_t codes_stride = width + (strided ? 16 : 0), n = tokens * args.x_stride, size = epmoe_dtype_size(dtype);
    int64_t scales = quant == EPMOE_GRANULARITY_TENSOR  ? 1
                     : quant == EPMOE_GRANULARITY_TOKEN ? tokens
                                                        : tokens * epmoei_ceil_div(width, 128);
    snprintf(what, sizeof what, "T %d d %d %s, quant %d, activation %d, strided %d", tokens, width,
             epmoe_dtype_string(dtype), (int)quant, (int)args.activation, strided);
    char *host = malloc((size_t)(n * size));
    testing_fill_normal(rng, host, dtype, n, 5);
    epmoei_store(host, dtype, testing_range(rng, 0, width - 1), NAN);
    if (tokens > 1) epmoei_store(host, dtype, args.x_stride, INFINITY);
    if (tokens > 2) memset(host + 2 * args.x_stride * size, 0, (size_t)(args.x_stride * size));
    const float given = 0.0123f;
    void *x = gpu_copy_of(host, n * size), *rows = gpu_buffer((int64_t)tokens * width * size, 0);
    void *codes = gpu_buffer((int64_t)tokens * width, 0), *fused = gpu_buffer(tokens * codes_stride, 0);
    void *scale = gpu_buffer(scales * 4, 0), *fused_scale = gpu_buffer(scales * 4, 0), *fixed = gpu_copy_of(&given, 4);
    args.x = x, args.y = rows;
    cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    epmoe_quantize_fp8_args_t quantize = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    quantize.backend = EPMOE_BACKEND_CUDA, quantize.num_tokens = tokens, quantize.hidden = width;
    quantize.dtype = dtype, quantize.granularity = quant, quantize.x = rows, quantize.q = codes, quantize.scale = scale;
    if (quant == EPMOE_GRANULARITY_TENSOR) quantize.static_scale = args.static_scale = fixed;
    cr_assert_eq(epmoe_quantize_fp8(&quantize, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    args.quant = quant, args.y = fused, args.y_stride = codes_stride;
    args.scale = quant == EPMOE_GRANULARITY_TENSOR ? NULL : fused_scale;
    cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    cr_assert(gpu_wait());
    uint8_t *got = gpu_get_new(fused, tokens * codes_stride), *expected = gpu_get_new(codes, (int64_t)tokens * width);
    for (int64_t t = 0; t < tokens; t++)
        cr_assert(gpu_same(what, got + t * codes_stride, expected + t * width, width, 1, width), "%s: row %lld", what,
                  (long long)t);
    if (args.scale) expect_same(what, fused_scale, scale, scales * 4);
    cr_assert(gpu_guards_intact(fused));
    free(got), free(expected), free(host);
    void *const all[] = {x, rows, codes, fused, scale, fused_scale, fixed};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) gpu_buffer_free(all[i]);
}

Test(gpu_dense_fused, silu_and_quantisation)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t widths[] = {1, 12, 128, 129, 352, 704, 1234, 3420, 8192, 14336}, tokens[] = {1, 3, 64, 1025};
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++)
            for (int32_t i = 0; i < 9; i++)
                check_silu(&rng, tokens[t], widths[w], dtypes[i % 3], (epmoe_granularity_t)(1 + i / 3),
                           testing_range(&rng, 0, 1));
}

/* ------------------------------------------------------------------------------------------ projections by E4M3 */

static void multiply(epmoe_linear_args_t *args, const char *what)
{
    cr_assert_eq(epmoe_linear_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s: %s", what,
                 epmoe_last_error());
    args->workspace = gpu_buffer(args->workspace_bytes, 0);
    cr_assert_eq(epmoe_linear(args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    cr_assert(gpu_wait() && gpu_guards_intact(args->workspace), "%s", what);
    gpu_buffer_free(args->workspace);
}

static void check_projection(testing_rng_t *rng, int32_t tokens, int32_t n, int32_t k, epmoe_dtype_t dtype,
                             epmoe_granularity_t quant)
{
    const bool blocks = quant == EPMOE_GRANULARITY_BLOCK128;
    const int64_t x_count = (int64_t)tokens * k, w_count = (int64_t)n * k, y_bytes = (int64_t)tokens * n * 4;
    const int64_t w_scales = blocks ? epmoei_ceil_div(n, 128) * epmoei_ceil_div(k, 128) : n;
    const int64_t x_scales = quant == EPMOE_GRANULARITY_TENSOR ? 1 : tokens * (blocks ? epmoei_ceil_div(k, 128) : 1);
    char what[96];
    snprintf(what, sizeof what, "T %d N %d K %d %s, x_quant %d", tokens, n, k, epmoe_dtype_string(dtype), (int)quant);
    uint16_t *x = malloc((size_t)x_count * 2);
    uint8_t *w = malloc((size_t)w_count);
    float *scales = malloc((size_t)w_scales * 4);
    testing_fill_normal(rng, x, dtype, x_count, 1);
    for (int64_t i = 0; i < w_count; i++) w[i] = (uint8_t)((testing_next(rng) & 0x87) | 0x30); /* 0.5 to 0.94 */
    for (int64_t i = 0; i < w_scales; i++) scales[i] = testing_uniform(rng, 0.5f, 2);
    epmoe_linear_args_t args = EPMOE_LINEAR_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA, args.num_tokens = tokens, args.n = n, args.k = k;
    args.x_dtype = dtype, args.y_dtype = EPMOE_F32, args.x_quant = quant;
    args.weight.struct_size = sizeof args.weight, args.weight.format = EPMOE_FORMAT_FP8_BLOCK;
    args.weight.scales_dtype = EPMOE_F32;
    args.weight.group_size = blocks ? 128 : -1, args.weight.group_rows = blocks ? 128 : 1;
    void *all[] = {gpu_copy_of(x, x_count * 2), gpu_copy_of(w, w_count),     gpu_copy_of(scales, w_scales * 4),
                   gpu_buffer(x_count, 0),      gpu_buffer(x_scales * 4, 0), gpu_buffer(y_bytes, 0),
                   gpu_buffer(y_bytes, 0)};
    args.x = all[0], args.weight.data = all[1], args.weight.scales = all[2], args.y = all[5];
    multiply(&args, what);
    epmoe_quantize_fp8_args_t quantize = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    quantize.backend = EPMOE_BACKEND_CUDA, quantize.num_tokens = tokens, quantize.hidden = k, quantize.dtype = dtype;
    quantize.granularity = quant, quantize.x = all[0], quantize.q = all[3], quantize.scale = all[4];
    cr_assert_eq(epmoe_quantize_fp8(&quantize, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    epmoe_linear_args_t given = args;
    given.x = all[3], given.x_dtype = EPMOE_F8_E4M3, given.x_scale = all[4], given.y = all[6];
    multiply(&given, what);
    expect_same(what, all[5], all[6], y_bytes);
    if (quant == EPMOE_GRANULARITY_TENSOR) { /* a static scale that is the dynamic one */
        given = args;
        given.x_scale = all[4], given.y = all[6];
        gpu_poison(all[6], y_bytes);
        multiply(&given, what);
        expect_same(what, all[6], all[5], y_bytes);
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) gpu_buffer_free(all[i]);
    free(x), free(w), free(scales);
}

/* What epmoe_quantize_fp8 makes of x gives the bits that x itself does, whoever quantises. */
Test(gpu_dense_fused, projection_and_quantisation)
{
    GPU_TEST_NEEDS_DEVICE();
    if (strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90")) cr_skip_test("no kernel of this tier");
    static const int32_t shapes[][3] = {{1, 144, 272}, {9, 1000, 1040}, {70, 256, 7168}, {300, 33, 528}};
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int32_t i = 0; i < 6; i++)
            check_projection(&rng, shapes[s][0], shapes[s][1], shapes[s][2], dtypes[i / 3],
                             (epmoe_granularity_t)(EPMOE_GRANULARITY_TENSOR + i % 3));
}

/* --------------------------------------------------------------------------------------------- ops behind each other
 */

/* The buffers of a chain in which every op reads what the one before it wrote, and the first what the last wrote. */
typedef struct chain_t {
    int32_t tokens, width;
    void *x, *weight, *normed, *gated, *codes, *scale; /* x [T,2*width] */
} chain_t;

static void chain_step(const chain_t *c, void *y, bool wait)
{
    epmoe_rms_norm_args_t norm = EPMOE_RMS_NORM_ARGS_INIT;
    epmoe_silu_and_mul_args_t silu = EPMOE_SILU_AND_MUL_ARGS_INIT;
    epmoe_quantize_fp8_args_t quantize = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    norm.backend = silu.backend = quantize.backend = EPMOE_BACKEND_CUDA;
    norm.num_tokens = silu.num_tokens = quantize.num_tokens = c->tokens;
    norm.dtype = silu.dtype = quantize.dtype = EPMOE_BF16;
    norm.hidden = 2 * c->width, norm.x = c->x, norm.weight = c->weight, norm.y = c->normed;
    silu.width = quantize.hidden = c->width, silu.x = c->normed, silu.y = c->gated;
    quantize.granularity = EPMOE_GRANULARITY_BLOCK128;
    quantize.x = c->gated, quantize.q = c->codes, quantize.scale = c->scale;
    cr_assert_eq(epmoe_rms_norm(&norm, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    if (wait) cr_assert(gpu_wait());
    cr_assert_eq(epmoe_silu_and_mul(&silu, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    if (wait) cr_assert(gpu_wait());
    cr_assert_eq(epmoe_quantize_fp8(&quantize, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    if (wait) cr_assert(gpu_wait());
    /* Half a row of what comes next is this step's. */
    cr_assert_eq(
        epmoei_memory_copy(EPMOE_BACKEND_CUDA, c->x, c->gated, (int64_t)c->tokens * c->width * 2, gpu_stream()),
        EPMOE_OK);
    silu.x = c->normed, silu.y = y;
    cr_assert_eq(epmoe_silu_and_mul(&silu, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    if (wait) cr_assert(gpu_wait());
}

/* A kernel that comes to the device early must not read early: the bits are those of ops that are waited for. */
Test(gpu_dense_fused, a_chain_reads_what_was_written)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kSteps = 12 };
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t tokens[] = {1, 16, 700, 4096};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        chain_t c = {.tokens = tokens[i], .width = 1024};
        int64_t rows = tokens[i], bytes = rows * c.width * 2;
        uint16_t *x = malloc((size_t)bytes * 2), *w = malloc((size_t)c.width * 4);
        testing_fill_normal(&rng, x, EPMOE_BF16, rows * 2 * c.width, 2);
        testing_fill_normal(&rng, w, EPMOE_BF16, 2 * c.width, 1);
        c.weight = gpu_copy_of(w, (int64_t)c.width * 4);
        c.x = gpu_buffer(bytes * 2, 0), c.normed = gpu_buffer(bytes * 2, 0), c.gated = gpu_buffer(bytes, 0);
        c.codes = gpu_buffer(rows * c.width, 0), c.scale = gpu_buffer(rows * c.width / 128 * 4, 0);
        void *y[2] = {gpu_buffer(kSteps * bytes, 0), gpu_buffer(kSteps * bytes, 0)};
        void *codes[2];
        for (int wait = 0; wait < 2; wait++) {
            gpu_put(c.x, x, bytes * 2);
            for (int64_t s = 0; s < kSteps; s++) chain_step(&c, (char *)y[wait] + s * bytes, wait);
            cr_assert(gpu_wait());
            codes[wait] = gpu_get_new(c.codes, rows * c.width);
        }
        expect_same("a chain", y[0], y[1], kSteps * bytes);
        cr_assert(gpu_same("codes of a chain", codes[0], codes[1], rows * c.width, 1, c.width));
        void *const all[] = {c.x, c.weight, c.normed, c.gated, c.codes, c.scale, y[0], y[1]};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) gpu_buffer_free(all[k]);
        free(codes[0]), free(codes[1]), free(x), free(w);
    }
}

/* ----------------------------------------------------------------------------------------------------- MLA's columns
 */

static void check_join(testing_rng_t *rng, int32_t tokens, int32_t heads, int32_t latent, int32_t rope,
                       epmoe_dtype_t dtype)
{
    char what[96];
    int64_t rows = (int64_t)tokens * heads, width = (int64_t)latent + rope;
    snprintf(what, sizeof what, "T %d, %d heads of %d + %d, %s", tokens, heads, latent, rope,
             epmoe_dtype_string(dtype));
    uint16_t *absorbed = malloc((size_t)(rows * latent) * 2), *q = malloc((size_t)(rows * width) * 2),
             *key = malloc((size_t)(tokens * width) * 2);
    float *q_rope = malloc((size_t)(rows * rope) * 4), *key_rows = malloc((size_t)(tokens * width) * 4);
    testing_fill_normal(rng, absorbed, dtype, rows * latent, 1);
    testing_fill_normal(rng, key, dtype, tokens * width, 1);
    testing_fill_normal(rng, q_rope, EPMOE_F32, rows * rope, 3);
    testing_fill_normal(rng, key_rows, EPMOE_F32, tokens * width, 3);
    q_rope[0] = NAN;
    epmoei_join_args_t args = {
        .dtype = dtype, .num_tokens = tokens, .num_heads = heads, .latent = latent, .rope = rope};
    args.q = gpu_buffer(rows * width * 2, 0), args.key = gpu_copy_of(key, tokens * width * 2);
    args.absorbed = gpu_copy_of(absorbed, rows * latent * 2), args.q_rope = gpu_copy_of(q_rope, rows * rope * 4);
    args.key_rows = gpu_copy_of(key_rows, tokens * width * 4);
    cr_assert_eq(epmoei_join_rotated_sm80(&args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    cr_assert(gpu_wait());
    for (int64_t r = 0; r < rows; r++) {
        memcpy(q + r * width, absorbed + r * latent, (size_t)latent * 2);
        for (int64_t i = 0; i < rope; i++) epmoei_store(q, dtype, r * width + latent + i, q_rope[r * rope + i]);
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = latent; i < width; i++) epmoei_store(key, dtype, t * width + i, key_rows[t * width + i]);
    uint16_t *got_q = gpu_get_new(args.q, rows * width * 2), *got_key = gpu_get_new(args.key, tokens * width * 2);
    cr_assert(isnan(epmoei_load(got_q, dtype, latent)), "%s", what); /* of any sign and payload */
    got_q[latent] = q[latent];
    cr_assert(gpu_same(what, got_q, q, rows * width, 2, width), "%s", what);
    cr_assert(gpu_same(what, got_key, key, tokens * width, 2, width), "%s", what);
    cr_assert(gpu_guards_intact(args.q) && gpu_guards_intact(args.key), "%s", what);
    gpu_buffer_free(args.q), gpu_buffer_free(args.key);
    const void *const inputs[] = {args.absorbed, args.q_rope, args.key_rows};
    for (size_t i = 0; i < 3; i++) gpu_buffer_free((void *)(uintptr_t)inputs[i]);
    free(absorbed), free(q), free(key), free(q_rope), free(key_rows), free(got_q), free(got_key);
}

Test(gpu_dense_fused, rotated_columns_join_the_latents)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t tokens[] = {1, 3, 130}, latents[] = {16, 12, 512, 7}, ropes[] = {8, 4, 64, 10};
    for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++)
        for (int i = 0; i < 8; i++)
            check_join(&rng, tokens[t], i % 2 ? 1 : 16, latents[i / 2], ropes[i / 2], i % 3 ? EPMOE_BF16 : EPMOE_F16);
}

/* Rows of x and y that lie 2^31 elements apart, and blocks of a cache. At position 0 nothing turns. */
Test(gpu_dense_fused, offsets_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kWidth = 1024, kHead = 64 };
    const int64_t stride = (1ll << 31) + 64;
    testing_rng_t rng = testing_rng(testing_seed());
    static uint16_t rows[2 * 2 * kWidth];
    uint8_t near[2 * kWidth], far[kWidth];
    float near_scale[16], far_scale[16];
    testing_fill_normal(&rng, rows, EPMOE_BF16, 4 * kWidth, 2);
    char *wide = gpu_buffer(2 * (stride + 2 * kWidth), 0), *codes = gpu_buffer(stride + kWidth, 0);
    void *x = gpu_copy_of(rows, sizeof rows), *y = gpu_buffer(2 * kWidth, 0), *scale = gpu_buffer(64, 0);
    gpu_put(wide, rows, 4 * kWidth), gpu_put(wide + 2 * stride, rows + 2 * kWidth, 4 * kWidth);
    for (int quant = EPMOE_GRANULARITY_TOKEN; quant <= EPMOE_GRANULARITY_BLOCK128; quant++) {
        epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CUDA, args.num_tokens = 2, args.width = kWidth, args.dtype = EPMOE_BF16;
        args.quant = (epmoe_granularity_t)quant, args.scale = scale;
        int64_t scales = quant == EPMOE_GRANULARITY_TOKEN ? 2 : 16;
        args.x = x, args.y = y;
        cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        gpu_get(near, y, sizeof near), gpu_get(near_scale, scale, scales * 4);
        args.x = wide, args.y = codes, args.x_stride = args.y_stride = stride;
        cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        gpu_get(far_scale, scale, scales * 4);
        cr_assert_eq(memcmp(near_scale, far_scale, (size_t)scales * 4), 0);
        for (int t = 0; t < 2; t++) {
            gpu_get(far, codes + t * stride, kWidth);
            cr_assert(gpu_same("codes", far, near + t * kWidth, kWidth, 1, kWidth));
        }
    }
    /* The same memory as two blocks of one head and one slot each. */
    const int64_t zero_position[2] = {0, 0}, slots[2] = {1, 0};
    float turn[kHead];
    for (int i = 0; i < kHead; i++) turn[i] = i < kHead / 2;
    void *positions = gpu_copy_of(zero_position, 16), *places = gpu_copy_of(slots, 16),
         *angles = gpu_copy_of(turn, sizeof turn);
    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    epmoe_cache_write_args_t cache = EPMOE_CACHE_WRITE_ARGS_INIT;
    rope.backend = cache.backend = EPMOE_BACKEND_CUDA, rope.num_tokens = cache.num_tokens = 2;
    rope.num_heads = rope.num_kv_heads = cache.num_kv_heads = 1, rope.head_dim = cache.head_dim = kHead;
    rope.dtype = cache.dtype = EPMOE_BF16, rope.q = x, rope.k = (char *)x + 2 * kHead, rope.q_stride = kWidth;
    rope.k_stride = kWidth, rope.positions = positions, rope.cos_sin = angles, rope.num_positions = 1;
    cache.num_blocks = 2, cache.block_size = 1, cache.layout = EPMOE_CACHE_LAYOUT_NHD, cache.slots = places;
    cache.key_cache = wide, cache.key_block_stride = stride, cache.value = (char *)x + 4 * kHead;
    cache.value_stride = kWidth, cache.value_cache = wide + 4 * kHead, cache.value_block_stride = stride;
    cr_assert_eq(epmoe_rope_cache_write(&rope, &cache, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    for (int t = 0; t < 2; t++) {
        uint16_t got[kHead];
        const char *block = wide + 2 * stride * slots[t];
        gpu_get(got, block, sizeof got);
        cr_assert(gpu_same("keys", got, rows + t * kWidth + kHead, kHead, 2, kHead));
        gpu_get(got, block + 4 * kHead, sizeof got);
        cr_assert(gpu_same("values", got, rows + t * kWidth + 2 * kHead, kHead, 2, kHead));
    }
    void *const all[] = {wide, codes, x, y, scale, positions, places, angles};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) gpu_buffer_free(all[i]);
}

/* What the device cannot take is refused by name, and nothing is written. */
Test(gpu_dense_fused, misaligned)
{
    GPU_TEST_NEEDS_DEVICE();
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    char *x = gpu_buffer(4096, 0), *y = gpu_buffer(4096, 0), *scale = gpu_buffer(64, 0);
    args.backend = EPMOE_BACKEND_CUDA, args.num_tokens = 2, args.width = 128, args.dtype = EPMOE_BF16;
    args.quant = EPMOE_GRANULARITY_TOKEN;
    args.x = x, args.y = y + 8, args.scale = (float *)scale;
    cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_ERROR_INVALID_ARGUMENT);
    args.y = y, args.scale = (float *)(scale + 2);
    cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(gpu_wait() && gpu_is_poison(y, 0, 4096) && gpu_is_poison(scale, 0, 64));
    gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(scale);
}
