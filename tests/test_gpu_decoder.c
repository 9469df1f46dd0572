/* Decoder layers and the head on a device: golden checkpoints from a prompt, from steps through a captured graph and
 * beside another sequence, in every layout of the cache; what is
 * refused, and that nothing leaks. */
#include "tests/decoder_case.h"
#include "tests/e4m3_oracle.h"
#include "tests/gpu_testing.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

TestSuite(gpu_decoder, .timeout = 600);

static const char *const families[] = {"mixtral", "qwen3_moe",   "qwen2_moe",  "glm4_moe",
                                       "gpt_oss", "deepseek_v2", "deepseek_v3"};
enum { kFamilies = sizeof families / sizeof families[0] };

/* As moe_tool check: a row whose experts the rounding of its input has changed is left out, and there may be few. */
#define BF16_TOLERANCE     1e-2
#define BF16_FEW_TOLERANCE 2e-2 /* of calls with fewer tokens than kMany */
#define F16_TOLERANCE      3e-3
#define ROW_TOLERANCE      8e-2
#define MOST_LEFT_OUT      3

enum { kMany = 16 };

static double tolerance_of(epmoe_dtype_t dtype, int32_t call)
{
    if (dtype != EPMOE_BF16) return F16_TOLERANCE;
    return call < kMany ? BF16_FEW_TOLERANCE : BF16_TOLERANCE;
}

/* [rows,d], of calls with `call` tokens each: the error of the rows that took the recorded way. */
static void expect_close(const void *y, epmoe_dtype_t dtype, const double *ref, int64_t rows, int64_t d, int32_t call,
                         const char *name, const char *what)
{
    double squares = 0, errors = 0, largest = 0; /* of a row */
    int32_t left_out = 0;
    for (int64_t r = 0; r < rows; r++) {
        double row = 0, error = 0;
        for (int64_t i = r * d; i < (r + 1) * d; i++) {
            double difference = (double)epmoei_load(y, dtype, i) - ref[i];
            row += ref[i] * ref[i];
            error += difference * difference;
        }
        cr_assert(isfinite(error), "%s, %s: row %lld is no number", name, what, (long long)r);
        if (error > ROW_TOLERANCE * ROW_TOLERANCE * row)
            left_out++;
        else
            squares += row, errors += error, largest = fmax(largest, sqrt(error / row));
    }
    double rel_err = sqrt(errors / squares);
    fprintf(stderr, "%s %s, %s: rel_err %.3g, %.3g in a row, %d rows left out\n", name, epmoe_dtype_string(dtype), what,
            rel_err, largest, left_out);
    cr_expect(rel_err <= tolerance_of(dtype, call), "%s %s, %s: rel_err is %g", name, epmoe_dtype_string(dtype), what,
              rel_err);
    cr_expect_leq(left_out, MOST_LEFT_OUT, "%s %s, %s: %d rows differ", name, epmoe_dtype_string(dtype), what,
                  left_out);
}

/* The arrays of a forward on the device. */
typedef struct batch_t {
    int32_t *query_start, *seq_lens, *block_table;
} batch_t;

static batch_t batch_make(const int32_t *query_start, const int32_t *seq_lens, const int32_t *block_table, int32_t seqs)
{
    return (batch_t){gpu_copy_of(query_start, (seqs + 1) * 4), gpu_copy_of(seq_lens, seqs * 4),
                     gpu_copy_of(block_table, (int64_t)seqs * kDecoderMaxBlocks * 4)};
}

static void batch_free(batch_t *batch)
{
    gpu_buffer_free(batch->query_start);
    gpu_buffer_free(batch->seq_lens);
    gpu_buffer_free(batch->block_table);
}

static epmoe_decoder_forward_args_t args_of(const batch_t *batch, int32_t tokens, int32_t seqs, const void *x, void *y)
{
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    args.num_tokens = tokens;
    args.num_seqs = seqs;
    args.x = x;
    args.y = y;
    args.query_start = batch->query_start;
    args.seq_lens = batch->seq_lens;
    args.block_table = batch->block_table;
    args.max_blocks = kDecoderMaxBlocks;
    return args;
}

static void *input_of(const decoder_case_t *c, epmoe_dtype_t dtype)
{
    int64_t n = (int64_t)kDecoderTokens * c->hidden;
    void *host = malloc((size_t)n * 2);
    epmoei_from_f32(host, c->in, dtype, n);
    void *device = gpu_copy_of(host, n * 2);
    free(host);
    return device;
}

static void forward(decoder_case_t *c, const epmoe_decoder_forward_args_t *args)
{
    cr_assert_eq(epmoe_decoder_forward(c->decoder, args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
}

Test(gpu_decoder, prompts)
{
    GPU_TEST_NEEDS_DEVICE();
    static const epmoe_cache_layout_t layouts[] = {EPMOE_CACHE_LAYOUT_NHD, EPMOE_CACHE_LAYOUT_HND,
                                                   EPMOE_CACHE_LAYOUT_V1};
    for (int f = 0; f < kFamilies; f++)
        for (int32_t i = 0; i < 6; i++) {
            const int32_t start[] = {0, kDecoderTokens}, length = kDecoderTokens, layer = i % 2;
            const epmoe_dtype_t dtype = i / 2 == 1 ? EPMOE_F16 : EPMOE_BF16;
            decoder_case_t c = decoder_case_open(families[f], layer);
            c.config.cache_layout = layouts[i / 2];
            decoder_case_make(&c, layer, dtype, NULL);
            int64_t bytes = (int64_t)kDecoderTokens * c.hidden * 2, live = epmoei_alloc_live();
            batch_t batch = batch_make(start, &length, c.block_table, 1);
            void *x = input_of(&c, dtype), *y = gpu_buffer(bytes, 0);
            epmoe_decoder_forward_args_t args = args_of(&batch, kDecoderTokens, 1, x, y);
            forward(&c, &args);
            void *got = gpu_get_new(y, bytes);
            expect_close(got, dtype, c.out, kDecoderTokens, c.hidden, kDecoderTokens, families[f], "prompt");
            /* Once more, in place, over a cache that holds the same already: the same bits. */
            args.y = x;
            forward(&c, &args);
            void *again = gpu_get_new(x, bytes);
            cr_expect(gpu_same("y in place", again, got, bytes / 2, 2, c.hidden));
            cr_expect(gpu_guards_intact(y) && gpu_guards_intact(x));
            free(got), free(again);
            gpu_buffer_free(x), gpu_buffer_free(y);
            batch_free(&batch);
            cr_expect_eq(epmoei_alloc_live(), live);
            decoder_case_close(&c);
            cr_expect_eq(epmoei_alloc_live(), 0);
        }
}

/* One captured step, replayed for every token with other lengths, beside a sequence of padding. */
Test(gpu_decoder, steps_of_a_graph)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int f = 0; f < kFamilies; f++) {
        const int32_t layer = 1, start[] = {0, 1, 2};
        int32_t lens[] = {1, 0};
        decoder_case_t c = decoder_case_open(families[f], layer);
        decoder_case_make(&c, layer, EPMOE_BF16, NULL);
        int64_t row = (int64_t)c.hidden * 2;
        batch_t batch = batch_make(start, lens, c.block_table, 2);
        char *all = input_of(&c, EPMOE_BF16), *steps = malloc((size_t)(kDecoderTokens * row));
        char *x = gpu_buffer(2 * row, 0), *y = gpu_buffer(2 * row, 0);
        epmoe_decoder_forward_args_t args = args_of(&batch, 2, 2, x, y);
        gpu_put(x, all, row);
        gpu_put(x + row, all, row);
        forward(&c, &args);
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        cr_assert_eq(cudaStreamBeginCapture(gpu_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
        epmoe_status_t status = epmoe_decoder_forward(c.decoder, &args, gpu_stream());
        cr_assert_eq(cudaStreamEndCapture(gpu_stream(), &graph), cudaSuccess);
        cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int32_t t = 0; t < kDecoderTokens; t++) {
            lens[0] = t + 1;
            gpu_put(batch.seq_lens, lens, sizeof lens);
            gpu_put(x, all + t * row, row);
            cr_assert_eq(cudaGraphLaunch(exec, gpu_stream()), cudaSuccess);
            cr_assert(gpu_wait());
            gpu_get(steps + t * row, y, row);
        }
        expect_close(steps, EPMOE_BF16, c.out, kDecoderTokens, c.hidden, 2, families[f], "steps of a graph");
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        free(steps);
        gpu_buffer_free(all), gpu_buffer_free(x), gpu_buffer_free(y);
        batch_free(&batch);
        decoder_case_close(&c);
    }
}

/* A prompt in two pieces, beside another sequence. */
Test(gpu_decoder, pieces_beside_another_sequence)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int f = 0; f < kFamilies; f++) {
        const int32_t layer = 0, half = kDecoderTokens / 2;
        decoder_case_t c = decoder_case_open(families[f], layer);
        decoder_case_make(&c, layer, EPMOE_BF16, NULL);
        int64_t row = (int64_t)c.hidden * 2;
        char *all = input_of(&c, EPMOE_BF16), *host = malloc((size_t)(kDecoderTokens * row));
        char *x = gpu_buffer((half + 3) * row, 0), *y = gpu_buffer((half + 3) * row, 0);
        for (int32_t part = 0; part < 2; part++) {
            const int32_t start[] = {0, half, half + 3}, lens[] = {half * (part + 1), 3 * (part + 1)};
            batch_t batch = batch_make(start, lens, c.block_table, 2);
            gpu_put(x, all + part * half * row, half * row);
            gpu_put(x + half * row, all + row, 3 * row);
            epmoe_decoder_forward_args_t args = args_of(&batch, half + 3, 2, x, y);
            forward(&c, &args);
            gpu_get(host + part * half * row, y, half * row);
            batch_free(&batch);
        }
        expect_close(host, EPMOE_BF16, c.out, kDecoderTokens, c.hidden, half + 3, families[f], "pieces");
        cr_expect(gpu_guards_intact(y));
        free(host);
        gpu_buffer_free(all), gpu_buffer_free(x), gpu_buffer_free(y);
        decoder_case_close(&c);
    }
}

Test(gpu_decoder, logits)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int f = 0; f < kFamilies; f++)
        for (int i = 0; i < 2; i++) {
            const epmoe_dtype_t dtype = i ? EPMOE_F16 : EPMOE_BF16;
            decoder_case_t c = decoder_case_open(families[f], 1);
            epmoe_head_config_t config = EPMOE_HEAD_CONFIG_INIT;
            epmoe_head_t *head, *on_cpu;
            cr_assert_eq(epmoe_checkpoint_head_config(c.checkpoint, &config), EPMOE_OK, "%s", epmoe_last_error());
            config.dtype = dtype;
            config.max_tokens = kDecoderTokens;
            config.backend = EPMOE_BACKEND_CUDA;
            cr_assert_eq(epmoe_head_create(&config, &head), EPMOE_OK, "%s", epmoe_last_error());
            config.backend = EPMOE_BACKEND_CPU;
            cr_assert_eq(epmoe_head_create(&config, &on_cpu), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(epmoe_head_load_checkpoint(head, c.checkpoint), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(epmoe_head_load_checkpoint(on_cpu, c.checkpoint), EPMOE_OK, "%s", epmoe_last_error());
            int64_t n = (int64_t)kDecoderTokens * c.hidden, logits = (int64_t)kDecoderTokens * config.vocab_size;
            void *x = malloc((size_t)n * 2);
            float *expected = malloc((size_t)logits * 4);
            double *ref = malloc((size_t)logits * sizeof *ref);
            epmoei_from_f32(x, c.in, dtype, n);
            cr_assert_eq(epmoe_head_forward(on_cpu, x, expected, kDecoderTokens, NULL), EPMOE_OK);
            for (int64_t j = 0; j < logits; j++) ref[j] = (double)expected[j];
            void *device_x = gpu_copy_of(x, n * 2);
            float *device_logits = gpu_buffer(logits * 4, 0);
            cr_assert_eq(epmoe_head_forward(head, device_x, device_logits, kDecoderTokens, gpu_stream()), EPMOE_OK,
                         "%s", epmoe_last_error());
            cr_assert(gpu_wait());
            float *got = gpu_get_new(device_logits, logits * 4);
            double error = testing_rel_error(got, EPMOE_F32, ref, logits);
            cr_expect(error <= 1e-3 * (i ? 1 : 5), "%s in %s: the logits are off by %g", families[f],
                      epmoe_dtype_string(dtype), error);
            cr_expect(gpu_guards_intact(device_logits));
            gpu_buffer_free(device_x), gpu_buffer_free(device_logits);
            free(x), free(expected), free(ref), free(got);
            epmoe_head_destroy(head);
            epmoe_head_destroy(on_cpu);
            decoder_case_close(&c);
            cr_expect_eq(epmoei_alloc_live(), 0);
        }
}

/* What a forward of 6 tokens makes of a cache that is the caller's; on the host. */
typedef struct cached_t {
    int64_t key_bytes, value_bytes; /* of all blocks */
    int32_t hidden;
    uint16_t *y;
    uint8_t *keys, *values;
} cached_t;

enum { kCachedTokens = 6, kCachedBlocks = kDecoderSeqs * kDecoderMaxBlocks };

static cached_t cached_by(const char *name, epmoe_dtype_t cache_dtype, epmoe_comm_t *cpu)
{
    const int32_t start[] = {0, kCachedTokens}, length = kCachedTokens;
    const float scale = 0.03125f;
    decoder_case_t c = decoder_case_open(name, 1);
    cached_t out = {.hidden = c.hidden};
    const int64_t bytes = (int64_t)kCachedTokens * c.hidden * 2;
    c.config.cache_dtype = cache_dtype, c.config.block_size = kDecoderBlock;
    c.mlp.dtype = EPMOE_BF16, c.mlp.max_tokens = kCachedTokens;
    cr_assert_eq(epmoe_decoder_create(&c.config, &c.mlp, cpu, &c.decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_load_checkpoint(c.decoder, c.checkpoint, 1, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_block_bytes(&c.config, EPMOE_BF16, &out.key_bytes, &out.value_bytes), EPMOE_OK);
    const int64_t keys = kCachedBlocks * out.key_bytes, values = kCachedBlocks * out.value_bytes;
    if (cpu) {
        uint16_t *x = malloc((size_t)bytes);
        epmoei_from_f32(x, c.in, EPMOE_BF16, bytes / 2);
        out.y = malloc((size_t)bytes), out.keys = malloc((size_t)keys), out.values = malloc((size_t)values + 1);
        memset(out.keys, 0xFF, (size_t)keys), memset(out.values, 0xFF, (size_t)values);
        epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, kCachedTokens, x, out.y);
        args.key_cache = out.keys, args.value_cache = values ? out.values : NULL, args.num_blocks = kCachedBlocks;
        if (cache_dtype == EPMOE_F8_E4M3) args.k_scale = args.v_scale = &scale;
        cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        free(x);
    } else {
        batch_t batch = batch_make(start, &length, c.block_table, 1);
        void *x = input_of(&c, EPMOE_BF16), *y = gpu_buffer(bytes, 0), *on_device = gpu_copy_of(&scale, 4);
        void *key_cache = gpu_buffer(keys, 0), *value_cache = values ? gpu_buffer(values, 0) : NULL;
        epmoe_decoder_forward_args_t args = args_of(&batch, kCachedTokens, 1, x, y);
        args.key_cache = key_cache, args.value_cache = value_cache, args.num_blocks = kCachedBlocks;
        if (cache_dtype == EPMOE_F8_E4M3) args.k_scale = args.v_scale = on_device;
        forward(&c, &args);
        out.y = gpu_get_new(y, bytes);
        out.keys = gpu_get_new(key_cache, keys), out.values = values ? gpu_get_new(value_cache, values) : malloc(1);
        /* Four tokens in the table's first block, two in its second one, and nothing anywhere else. */
        for (int32_t block = 0; block < kCachedBlocks; block++) {
            const int32_t place = block == c.block_table[0] ? 0 : block == c.block_table[1] ? 1 : 2;
            for (int side = 0; side < (values ? 2 : 1); side++) {
                const int64_t all = side ? out.value_bytes : out.key_bytes;
                const int64_t used = place == 0 ? all : place == 1 ? all / 2 : 0;
                cr_expect(gpu_is_poison(side ? value_cache : key_cache, block * all + used, all - used),
                          "%s: block %d of the %s was written behind its tokens", name, block,
                          side ? "values" : "keys");
            }
        }
        cr_expect(gpu_guards_intact(y) && gpu_guards_intact(key_cache) && (!values || gpu_guards_intact(value_cache)));
        gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(on_device);
        gpu_buffer_free(key_cache), gpu_buffer_free(value_cache);
        batch_free(&batch);
    }
    out.key_bytes = keys, out.value_bytes = values;
    decoder_case_close(&c);
    return out;
}

/* What both have written, by value. A code of E4M3 falls the other way where a key lies between two, which is a step of
 * up to an eighth of it, for one key in thirty whose bf16 is off by a part in 300. */
static double cache_error(const uint8_t *got, const uint8_t *expected, int64_t bytes, epmoe_dtype_t dtype)
{
    double squares = 0, errors = 0;
    const int64_t size = epmoe_dtype_size(dtype);
    for (int64_t i = 0; i < bytes / size; i++) {
        const bool unwritten = size == 1 ? expected[i] == 0xFF : expected[2 * i] == 0xFF && expected[2 * i + 1] == 0xFF;
        if (unwritten) continue;
        const double value = size == 1 ? e4m3_value(expected[i]) : (double)epmoei_load(expected, dtype, i);
        const double off = (size == 1 ? e4m3_value(got[i]) : (double)epmoei_load(got, dtype, i)) - value;
        squares += value * value, errors += off * off;
    }
    return sqrt(errors / squares);
}

/* In bf16 and in E4M3, grouped heads and MLA's latents: what is cached is what the CPU caches, in its place. */
Test(gpu_decoder, a_callers_cache)
{
    GPU_TEST_NEEDS_DEVICE();
    static const char *const names[] = {"qwen2_moe", "deepseek_v3"};
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    epmoe_comm_t *cpu = NULL;
    config.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_comm_create(NULL, &config, &cpu), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 4; i++) {
        const epmoe_dtype_t dtype = i % 2 ? EPMOE_F8_E4M3 : EPMOE_BF16;
        cached_t on_cpu = cached_by(names[i / 2], dtype, cpu), got = cached_by(names[i / 2], dtype, NULL);
        const double bound = i % 2 ? 4e-2 : BF16_FEW_TOLERANCE;
        double error = cache_error(got.keys, on_cpu.keys, got.key_bytes, dtype);
        cr_expect(error <= bound, "%s, %s: keys are off by %g", names[i / 2], epmoe_dtype_string(dtype), error);
        if (got.value_bytes) {
            error = cache_error(got.values, on_cpu.values, got.value_bytes, dtype);
            cr_expect(error <= bound, "%s, %s: values are off by %g", names[i / 2], epmoe_dtype_string(dtype), error);
        }
        /* One token may go to other experts. */
        int32_t far = 0;
        for (int64_t r = 0; r < kCachedTokens; r++) {
            double row = 0, off = 0;
            for (int64_t j = r * got.hidden; j < (r + 1) * got.hidden; j++) {
                const double expected = (double)epmoei_bf16_to_f32(on_cpu.y[j]);
                const double difference = (double)epmoei_bf16_to_f32(got.y[j]) - expected;
                row += expected * expected, off += difference * difference;
            }
            far += !(sqrt(off / row) <= bound);
        }
        cr_expect_leq(far, 1, "%s, %s: %d of %d rows of y are off by more than %g", names[i / 2],
                      epmoe_dtype_string(dtype), far, kCachedTokens, bound);
        free(on_cpu.y), free(on_cpu.keys), free(on_cpu.values), free(got.y), free(got.keys), free(got.values);
    }
    epmoe_comm_destroy(cpu);
}

Test(gpu_decoder, refused)
{
    GPU_TEST_NEEDS_DEVICE();
    decoder_case_t c = decoder_case_open("mixtral", 0);
    epmoe_decoder_t *decoder;
    c.mlp.dtype = EPMOE_F32;
    cr_expect_eq(epmoe_decoder_create(&c.config, &c.mlp, NULL, &decoder), EPMOE_ERROR_NOT_SUPPORTED);
    cr_expect(strstr(epmoe_last_error(), "f32"), "%s", epmoe_last_error());
    cr_expect_null(decoder);
    decoder_case_make(&c, 0, EPMOE_BF16, NULL);
    const int32_t start[] = {0, 2}, length = 2;
    batch_t batch = batch_make(start, &length, c.block_table, 1);
    void *x = input_of(&c, EPMOE_BF16), *y = gpu_buffer(2 * (int64_t)c.hidden * 2, 0);
    epmoe_decoder_forward_args_t args = args_of(&batch, 2, 1, x, y);
    args.seq_lens = NULL;
    cr_expect_eq(epmoe_decoder_forward(c.decoder, &args, gpu_stream()), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect(strstr(epmoe_last_error(), "seq_lens"), "%s", epmoe_last_error());
    args = args_of(&batch, 2, 1, (char *)x + 2, y);
    cr_expect_eq(epmoe_decoder_forward(c.decoder, &args, gpu_stream()), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect(gpu_wait() && gpu_is_poison(y, 0, 2 * (int64_t)c.hidden * 2));
    gpu_buffer_free(x), gpu_buffer_free(y);
    batch_free(&batch);
    decoder_case_close(&c);
    cr_expect_eq(epmoei_alloc_live(), 0);
}
