/* Weights of a layer on a device: repacked, borrowed, generated, loaded; what memory they take and give back. */
#include "comm/comm.h"
#include "kernels/plain_tiles.h"
#include "kernels/repack.h"
#include "moe/layer_weights.h"
#include "tests/gpu_layer_case.h"
#include "tests/op_testing.h"
#include "tools/tool_check.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_weights, .timeout = 300);

/* --------------------------------------------------------------------------------------------------- repack kernel */

static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};

/* Ordinary values, what overflows or underflows in another type, infinities, NaN, both zeros. */
static void fill_hard(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t n)
{
    static const float hard[] = {0,        -0.0f, INFINITY, -INFINITY, NAN,      1e30f,   -7e4f,       65519.0f,
                                 65520.0f, 1e-8f, 6e-5f,    1e-40f,    3.39e38f, 1.0039f, 1.01171875f, -1.00390625f};
    for (int64_t i = 0; i < n; i++) {
        float value = testing_range(rng, 0, 3) ? testing_normal(rng) : hard[testing_range(rng, 0, 15)];
        epmoei_store(data, dtype, i, value);
    }
}

static void check_repack(testing_rng_t *rng, const epmoei_repack_args_t *shape)
{
    epmoei_repack_args_t args = *shape;
    const epmoei_view_t *view = &args.src;
    int64_t span = epmoei_view_span(view), src_bytes = span * epmoe_dtype_size(view->dtype);
    int64_t rows = args.first_row + view->rows * args.row_step + 1; /* one row more than it may touch */
    int64_t n = rows * view->cols, size = epmoe_dtype_size(args.dst_dtype);
    void *src = malloc((size_t)src_bytes + 1), *expected = testing_buffer(n * size, 0);
    fill_hard(rng, src, view->dtype, span);
    void *device_src = gpu_copy_of(src, src_bytes), *dst = gpu_buffer(n * size, 0);
    args.src.data = src, args.dst = expected;
    epmoei_repack_ref(&args);
    args.src.data = device_src, args.dst = dst;
    cr_assert_eq(epmoei_repack_sm80(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    void *got = gpu_get_new(dst, n * size);
    for (int64_t i = 0; i < n; i++)
        cr_assert(op_same_bits((char *)got + i * size, (char *)expected + i * size, args.dst_dtype, 1),
                  "%s to %s, [%lld,%lld] strides %lld %lld, rows from %lld by %lld: element [%lld,%lld] is %g, not %g",
                  epmoe_dtype_string(view->dtype), epmoe_dtype_string(args.dst_dtype), (long long)view->rows,
                  (long long)view->cols, (long long)view->row_stride, (long long)view->col_stride,
                  (long long)args.first_row, (long long)args.row_step, (long long)(i / view->cols),
                  (long long)(i % view->cols), (double)epmoei_load(got, args.dst_dtype, i),
                  (double)epmoei_load(expected, args.dst_dtype, i));
    cr_expect(gpu_guards_intact(dst));
    cr_expect(gpu_guards_intact(device_src));
    gpu_buffer_free(dst), gpu_buffer_free(device_src);
    free(src), free(got), testing_buffer_free(expected);
}

Test(gpu_weights, repack_of_every_dtype_and_view)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int64_t sizes[][2] = {{1, 1}, {1, 77}, {33, 1}, {31, 33}, {64, 32}, {100, 41}};
    static const int64_t targets[][2] = {{0, 1}, {0, 2}, {1, 2}, {5, 3}};
    testing_rng_t rng = testing_rng(testing_seed());
    for (int pair = 0; pair < 9; pair++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            int64_t rows = sizes[s][0], cols = sizes[s][1];
            const int64_t strides[][2] = {{cols, 1},     {cols + 3, 1}, {1, rows},         {1, rows + 5},
                                          {2 * cols, 2}, {2, 2 * rows}, {3 * cols + 1, 3}, {2 * cols, 1}};
            for (size_t v = 0; v < sizeof strides / sizeof strides[0]; v++) {
                const int64_t *to = targets[(v + s) % 4];
                const epmoei_repack_args_t args = {{NULL, dtypes[pair / 3], rows, cols, strides[v][0], strides[v][1]},
                                                   NULL,
                                                   dtypes[pair % 3],
                                                   to[0],
                                                   to[1]};
                check_repack(&rng, &args);
            }
        }
}

/* More rows than one launch takes. */
Test(gpu_weights, repack_of_two_million_rows)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoei_repack_args_t args = {{NULL, EPMOE_BF16, 2100001, 1, 1, 1}, NULL, EPMOE_F32, 1, 2};
    check_repack(&rng, &args);
}

/* ------------------------------------------------------------------------------------------------ a caller's arrays */

enum { kD = 72, kF = 40, kE = 7, kK = 3, kFs = 24, kTokens = 33 };

static epmoe_layer_config_t full_config(epmoe_dtype_t dtype)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = kD, c.intermediate = kF, c.num_experts = kE, c.top_k = kK;
    c.router_has_bias = c.has_selection_bias = c.expert_has_bias = 1;
    c.shared_intermediate = kFs, c.shared_gated = 1;
    c.dtype = dtype;
    c.max_tokens = kTokens;
    return c;
}

/* y of one forward over fixed tokens, on the host. */
static void forward(epmoe_layer_t *layer, uint16_t y[kTokens * kD])
{
    testing_rng_t rng = testing_rng(5);
    gpu_tokens_t tokens = gpu_tokens(&rng, &layer->config, kTokens);
    cr_assert_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert(gpu_wait());
    gpu_get(y, tokens.y, kTokens * kD * 2);
    cr_assert(gpu_tokens_free(&tokens));
}

static bool same_y(const char *what, const uint16_t *y, const uint16_t *expected)
{
    return gpu_same(what, y, expected, kTokens * kD, 2, kD);
}

/* The rows of a gate-first [experts,2f,d] (d = 1: a bias) interleaved. */
static void *interleave(const void *data, int64_t experts, int64_t f, int64_t row_bytes)
{
    char *to = malloc((size_t)(experts * 2 * f * row_bytes));
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = 0; i < 2 * f; i++) {
            int64_t target = i < f ? 2 * i : 2 * (i - f) + 1;
            memcpy(to + (e * 2 * f + target) * row_bytes, (const char *)data + (e * 2 * f + i) * row_bytes,
                   (size_t)row_bytes);
        }
    return to;
}

static void free_const(const void *data) { free((void *)(uintptr_t)data); }
static void gpu_free_const(const void *data) { gpu_buffer_free((void *)(uintptr_t)data); }

/* The model's weights with gate and up rows alternating; three new arrays. */
static epmoe_layer_weights_t interleaved_weights(const oracle_model_t *model)
{
    epmoe_layer_weights_t w = model->weights;
    w.layout = EPMOE_LAYOUT_INTERLEAVED;
    w.gate_up.data = interleave(w.gate_up.data, kE, kF, kD * 2);
    w.gate_up_bias = interleave(w.gate_up_bias, kE, kF, 4);
    w.shared_gate_up.data = interleave(w.shared_gate_up.data, 1, kFs, kD * 2);
    return w;
}

static void free_interleaved(const epmoe_layer_weights_t *w)
{
    free_const(w->gate_up.data), free_const(w->gate_up_bias), free_const(w->shared_gate_up.data);
}

/* The same arrays in device memory. */
static epmoe_layer_weights_t on_device(const epmoe_layer_weights_t *host)
{
    epmoe_layer_weights_t w = *host;
    w.router = gpu_copy_of(w.router, kE * kD * 2);
    w.router_bias = gpu_copy_of(w.router_bias, kE * 4);
    w.selection_bias = gpu_copy_of(w.selection_bias, kE * 4);
    w.gate_up.data = gpu_copy_of(w.gate_up.data, kE * 2 * kF * kD * 2);
    w.down.data = gpu_copy_of(w.down.data, kE * kD * kF * 2);
    w.gate_up_bias = gpu_copy_of(w.gate_up_bias, kE * 2 * kF * 4);
    w.down_bias = gpu_copy_of(w.down_bias, kE * kD * 4);
    w.shared_gate_up.data = gpu_copy_of(w.shared_gate_up.data, 2 * kFs * kD * 2);
    w.shared_down.data = gpu_copy_of(w.shared_down.data, kD * kFs * 2);
    w.shared_gate = gpu_copy_of(w.shared_gate, kD * 2);
    return w;
}

static void free_on_device(const epmoe_layer_weights_t *w)
{
    const void *all[] = {w->router,       w->router_bias, w->selection_bias,      w->gate_up.data,     w->down.data,
                         w->gate_up_bias, w->down_bias,   w->shared_gate_up.data, w->shared_down.data, w->shared_gate};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) gpu_free_const(all[i]);
}

Test(gpu_weights, every_layout_from_host_and_device_gives_the_same_bits)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = full_config(i ? EPMOE_F16 : EPMOE_BF16);
        oracle_model_t model = gpu_model(&rng, &config);
        epmoe_layer_t *layer = gpu_layer_with(&model);
        cr_assert_not_null(layer);
        static uint16_t first[kTokens * kD], y[kTokens * kD];
        forward(layer, first);

        epmoe_layer_weights_t pairs[2] = {model.weights, interleaved_weights(&model)};
        for (int layout = 0; layout < 2; layout++)
            for (int device = 0; device < 2; device++) {
                char what[64];
                snprintf(what, sizeof what, "layout %d from %s", layout, device ? "device" : "host");
                epmoe_layer_weights_t w = device ? on_device(&pairs[layout]) : pairs[layout];
                cr_assert_eq(epmoe_layer_set_random_weights(layer, 3), EPMOE_OK);
                cr_assert_eq(epmoe_layer_set_weights(layer, &w), EPMOE_OK, "%s: %s", what, epmoe_last_error());
                if (device) free_on_device(&w); /* copied: the caller may free his */
                forward(layer, y);
                cr_expect(same_y(what, y, first));
            }
        free_interleaved(&pairs[1]);
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

/* PACKED on a device is INTERLEAVED; the four matrices stay the caller's, the rest is copied. */
Test(gpu_weights, packed_matrices_are_borrowed)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config(EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    static uint16_t first[kTokens * kD], y[kTokens * kD];
    forward(layer, first);
    epmoe_layer_weights_t interleaved = interleaved_weights(&model), w = on_device(&interleaved);
    w.layout = EPMOE_LAYOUT_PACKED;
    cr_assert_eq(epmoe_layer_set_weights(layer, &w), EPMOE_OK, "%s", epmoe_last_error());
    cr_expect_eq(layer->weights.gate_up, w.gate_up.data);
    cr_expect_eq(layer->weights.down, w.down.data);
    cr_expect_eq(layer->weights.shared_gate_up, w.shared_gate_up.data);
    cr_expect_eq(layer->weights.shared_down, w.shared_down.data);
    forward(layer, y);
    cr_expect(same_y("packed", y, first));

    const void *copied[] = {w.router, w.router_bias, w.selection_bias, w.gate_up_bias, w.down_bias, w.shared_gate};
    for (size_t i = 0; i < sizeof copied / sizeof copied[0]; i++) gpu_poison((void *)(uintptr_t)copied[i], 16);
    forward(layer, y);
    cr_expect(same_y("packed, the copied arrays changed", y, first));
    const void *borrowed[] = {w.gate_up.data, w.down.data, w.shared_gate_up.data, w.shared_down.data};
    for (size_t i = 0; i < sizeof borrowed / sizeof borrowed[0]; i++) {
        static uint16_t before[kTokens * kD];
        uint16_t ones[8 * kD];
        for (int32_t j = 0; j < 8 * kD; j++) ones[j] = epmoei_f32_to_bf16(0.5f + (float)i);
        memcpy(before, first, sizeof before);
        gpu_put((void *)(uintptr_t)borrowed[i], ones, 8 * 2 * kFs); /* some rows of every matrix */
        forward(layer, first);
        bool changed = memcmp(before, first, sizeof before);
        /* Expert 0 may have no token here; the shared expert has all. */
        if (i >= 2) cr_expect(changed, "borrowed matrix %zu changed and y did not", i);
    }
    /* The caller's memory outlives the layer: it is not freed with it. */
    epmoe_layer_destroy(layer);
    for (size_t i = 0; i < sizeof borrowed / sizeof borrowed[0]; i++) cr_expect(gpu_guards_intact(borrowed[i]));
    free_on_device(&w), free_interleaved(&interleaved);
    oracle_model_free(&model);
}

/* What cannot be borrowed or computed on is refused, and the layer keeps what it has. */
Test(gpu_weights, refused_weights_leave_the_old_ones)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config(EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    static uint16_t first[kTokens * kD], y[kTokens * kD];
    forward(layer, first);
    epmoe_layer_weights_t device = on_device(&model.weights);
    device.layout = EPMOE_LAYOUT_PACKED;
    char *shifted = gpu_buffer(kE * 2 * kF * kD * 2, 2);
#define REFUSED(base, change, expected_status, word)                                                                   \
    do {                                                                                                               \
        epmoe_layer_weights_t w = base;                                                                                \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_set_weights(layer, &w);                                                    \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        forward(layer, y);                                                                                             \
        cr_expect(same_y(#change, y, first));                                                                          \
    } while (0)
    REFUSED(device, w.gate_up.data = model.weights.gate_up.data, EPMOE_ERROR_INVALID_ARGUMENT, "weights.gate_up.data");
    REFUSED(device, w.down.data = model.weights.down.data, EPMOE_ERROR_INVALID_ARGUMENT, "weights.down.data");
    REFUSED(device, w.gate_up.data = shifted, EPMOE_ERROR_INVALID_ARGUMENT, "aligned to 16 bytes");
    REFUSED(device, w.shared_down.format = EPMOE_FORMAT_F16, EPMOE_ERROR_INVALID_ARGUMENT,
            "weights.shared_down.format is");
    REFUSED(model.weights, w.router_dtype = EPMOE_F32, EPMOE_ERROR_NOT_SUPPORTED, "router is f32");
    REFUSED(model.weights, w.router_dtype = EPMOE_F16, EPMOE_ERROR_NOT_SUPPORTED, "router is f16");
    REFUSED(model.weights, w.down.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "down is missing");
    REFUSED(model.weights, w.gate_up.format = EPMOE_FORMAT_FP8_BLOCK, EPMOE_ERROR_INVALID_ARGUMENT,
            "weights.gate_up.scales is NULL");
#undef REFUSED
    gpu_buffer_free(shifted), free_on_device(&device);
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Nothing is put on a device that is not the communicator's. */
Test(gpu_weights, another_current_device_is_refused)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config(EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model), *second = NULL;
    cr_assert_not_null(layer);
    static uint16_t first[kTokens * kD], y[kTokens * kD];
    forward(layer, first);
    layer->comm->device++;
    const epmoe_status_t statuses[] = {epmoe_layer_create(&config, layer->comm, &second),
                                       epmoe_layer_set_weights(layer, &model.weights),
                                       epmoe_layer_set_random_weights(layer, 1)};
    layer->comm->device--;
    for (int i = 0; i < 3; i++)
        cr_expect_eq(statuses[i], EPMOE_ERROR_BAD_STATE, "%d: %s", i, epmoe_status_string(statuses[i]));
    cr_expect_null(second);
    forward(layer, y);
    cr_expect(same_y("after refusals", y, first));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Matrices of another type are rounded to the activations' once. */
static void check_conversion(epmoe_dtype_t dtype)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config(dtype);
    epmoe_dtype_t other = dtype == EPMOE_BF16 ? EPMOE_F16 : EPMOE_BF16;
    const oracle_formats_t formats = {EPMOE_BF16, EPMOE_F32, other, other, EPMOE_F32, EPMOE_LAYOUT_GATE_FIRST};
    oracle_model_t model = oracle_model(&rng, &config, &formats), rounded = gpu_model(&rng, &config);
    const epmoe_layer_weights_t *from = &model.weights, *to = &rounded.weights;
    const struct {
        const void *from, *to;
        epmoe_dtype_t dtype;
        int64_t n;
    } tensors[] = {{from->router, to->router, EPMOE_BF16, kE * kD},
                   {from->shared_gate, to->shared_gate, EPMOE_BF16, kD},
                   {from->gate_up.data, to->gate_up.data, EPMOE_F32, kE * 2 * kF * kD},
                   {from->down.data, to->down.data, other, kE * kD * kF},
                   {from->shared_gate_up.data, to->shared_gate_up.data, other, 2 * kFs * kD},
                   {from->shared_down.data, to->shared_down.data, EPMOE_F32, kD * kFs}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        for (int64_t j = 0; j < tensors[i].n; j++)
            epmoei_store((void *)(uintptr_t)tensors[i].to, dtype, j, epmoei_load(tensors[i].from, tensors[i].dtype, j));
    const void *biases[][2] = {{from->router_bias, to->router_bias},
                               {from->selection_bias, to->selection_bias},
                               {from->gate_up_bias, to->gate_up_bias},
                               {from->down_bias, to->down_bias}};
    static const size_t counts[] = {kE, kE, kE * 2 * kF, kE * kD};
    for (size_t i = 0; i < 4; i++) memcpy((void *)(uintptr_t)biases[i][1], biases[i][0], counts[i] * 4);

    epmoe_layer_t *layer = gpu_layer_with(&rounded);
    cr_assert_not_null(layer);
    static uint16_t first[kTokens * kD], y[kTokens * kD];
    forward(layer, first);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 3), EPMOE_OK);
    cr_assert_eq(epmoe_layer_set_weights(layer, from), EPMOE_OK, "%s", epmoe_last_error());
    forward(layer, y);
    cr_expect(same_y(epmoe_dtype_string(dtype), y, first));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model), oracle_model_free(&rounded);
}

Test(gpu_weights, other_types_are_converted)
{
    GPU_TEST_NEEDS_DEVICE();
    check_conversion(EPMOE_BF16);
    check_conversion(EPMOE_F16);
}

/* --------------------------------------------------------------------------------------------------- random weights */

/* One packed tensor of the device's layer against the CPU's, whose gate and up rows come one after the other. */
static void expect_packed(const char *what, const epmoe_layer_t *layer, const void *device, const void *cpu,
                          int64_t experts, int64_t f, int64_t row_bytes, bool gate_up, bool tiled)
{
    int64_t rows = gate_up ? 2 * f : f, bytes = experts * rows * row_bytes;
    char *got = gpu_get_new(device, bytes), *plain = malloc((size_t)bytes + 1);
    if (tiled) {
        /* The CPU's rows as tiles: kernels/plain_tiles.h has them in its words, test_pack_tiles by hand. */
        const epmoei_plain_tiles_args_t args = {cpu,
                                                plain,
                                                (int32_t)experts,
                                                (int32_t)rows,
                                                (int32_t)(row_bytes / 2),
                                                gate_up ? EPMOEI_PLAIN_ROWS_GATE_FIRST : EPMOEI_PLAIN_ROWS_PLAIN};
        cr_assert_eq(epmoei_plain_tiles_cpu(&args), EPMOE_OK);
        cr_expect(gpu_same(what, got, plain, bytes, 1, row_bytes));
        free(got), free(plain);
        return;
    }
    memcpy(plain, got, (size_t)bytes);
    for (int64_t e = 0; gate_up && e < experts; e++)
        for (int up = 0; up < 2; up++) {
            int64_t first_row, row_step;
            epmoei_packed_rows(layer, f, up, &first_row, &row_step);
            for (int64_t i = 0; i < f; i++)
                memcpy(plain + (e * rows + up * f + i) * row_bytes,
                       got + (e * rows + first_row + i * row_step) * row_bytes, (size_t)row_bytes);
        }
    cr_expect(gpu_same(what, plain, cpu, bytes, 1, row_bytes));
    free(got), free(plain);
}

/* tokens: of a forward that is compared too, or 0. */
static void check_random_weights(const epmoe_layer_config_t *config, uint64_t seed, int32_t tokens)
{
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(config), *cpu = gpu_layer_on_cpu(config, &comm);
    cr_assert(layer && cpu);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, seed), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(cpu, seed), EPMOE_OK, "%s", epmoe_last_error());
    const epmoei_packed_weights_t *g = &layer->weights, *c = &cpu->weights;
    const bool tiles = !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90") && config->hidden % 64 == 0 &&
                       config->intermediate % 64 == 0;
    cr_expect(g->formats.gate_up_pack.tiles == tiles && g->formats.down_pack.tiles == tiles);
    int64_t n = config->num_experts, d = config->hidden, f = config->intermediate, fs = config->shared_intermediate;
    expect_packed("router", layer, g->router, c->router, 1, n, d * 2, false, false);
    expect_packed("router_bias", layer, g->router_bias, c->router_bias, 1, n, 4, false, false);
    expect_packed("selection_bias", layer, g->selection_bias, c->selection_bias, 1, n, 4, false, false);
    expect_packed("gate_up", layer, g->gate_up, c->gate_up, n, f, d * 2, true, g->formats.gate_up_pack.tiles);
    expect_packed("down", layer, g->down, c->down, n, d, f * 2, false, g->formats.down_pack.tiles);
    expect_packed("gate_up_bias", layer, g->gate_up_bias, c->gate_up_bias, n, f, 4, true, false);
    expect_packed("down_bias", layer, g->down_bias, c->down_bias, n, d, 4, false, false);
    expect_packed("shared_gate_up", layer, g->shared_gate_up, c->shared_gate_up, 1, fs, d * 2, true,
                  g->formats.shared_gate_up_pack.tiles);
    expect_packed("shared_down", layer, g->shared_down, c->shared_down, 1, d, fs * 2, false,
                  g->formats.shared_down_pack.tiles);
    expect_packed("shared_gate", layer, g->shared_gate, c->shared_gate, 1, 1, d * 2, false, false);
    testing_rng_t rng = testing_rng(seed);
    for (int i = 0; i < 2 && tokens; i++) {
        const gpu_error_t error = gpu_layer_error(layer, cpu, &rng, i ? 1 : tokens);
        cr_expect(error.row <= 1.6e-2 && error.all <= 6e-3, "%d tokens: y is off by %g, |y - cpu| / |cpu| is %g",
                  i ? 1 : tokens, error.row, error.all);
    }
    epmoe_layer_destroy(layer), epmoe_layer_destroy(cpu);
    epmoe_comm_destroy(comm);
}

Test(gpu_weights, random_weights_are_the_cpus)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    for (int i = 0; i < 2; i++) {
        epmoe_layer_config_t config = full_config(i ? EPMOE_F16 : EPMOE_BF16);
        check_random_weights(&config, testing_next(&rng), 0);
        /* More elements in a matrix than one sweep of the kernel's grid. */
        config.hidden = 1032, config.intermediate = 1048, config.num_experts = 3;
        check_random_weights(&config, testing_next(&rng), 0);
    }
}

/* Of gate and up and of down an expert is more than the 64 MiB by way of which weights become tiles, and is brought
 * there in parts; down's last block has half the rows of the others. */
Test(gpu_weights, experts_in_several_parts)
{
    GPU_TEST_NEEDS_DEVICE();
    epmoe_layer_config_t config = full_config(EPMOE_BF16);
    config.hidden = 7232, config.intermediate = 5184, config.num_experts = config.top_k = 2;
    check_random_weights(&config, testing_seed(), kTokens);
}

/* ----------------------------------------------------------------------------------------------------- checkpoints */

static bool same_set(const int32_t *a, const int32_t *b, int32_t k)
{
    for (int32_t i = 0; i < k; i++) {
        int32_t in_b = 0, in_a = 0;
        for (int32_t j = 0; j < k; j++) in_b += a[i] == b[j], in_a += b[i] == a[j];
        if (in_b != 1 || in_a != 1) return false;
    }
    return true;
}

static double rel_error(const void *out, epmoe_dtype_t dtype, const float *recorded, int64_t n)
{
    double *ref = malloc((size_t)n * sizeof *ref);
    for (int64_t i = 0; i < n; i++) ref[i] = (double)recorded[i];
    double error = testing_rel_error(out, dtype, ref, n);
    free(ref);
    return error;
}

static void check_block(const char *name, const epmoe_checkpoint_t *checkpoint, const golden_layer_t *golden,
                        epmoe_dtype_t dtype, double tolerance)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    golden_values_t values;
    int32_t index = golden->layer;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, index, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(golden_read(golden, &config, &values), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(values.in && values.out && (!config.num_experts || (values.logits && values.ids && values.weights)),
              "%s layer %d: something is not recorded", name, index);
    config.dtype = dtype;
    config.max_tokens = values.num_tokens;
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, index, NULL), EPMOE_OK, "%s layer %d: %s", name, index,
                 epmoe_last_error());
    int64_t rows = values.num_tokens, n = rows * config.hidden, experts = config.num_experts;
    int64_t k = experts ? config.top_k : 0;
    testing_rng_t rng = testing_rng(1);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, values.num_tokens);
    uint16_t *x = malloc((size_t)n * 2);
    epmoei_from_f32(x, values.in, dtype, n);
    gpu_put(tokens.x, x, n * 2);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = values.num_tokens, args.x = tokens.x, args.y = tokens.y;
    args.logits_out = tokens.logits_out, args.ids_out = tokens.ids_out, args.weights_out = tokens.weights_out;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s layer %d: %s", name, index,
                 epmoe_last_error());
    cr_assert(gpu_wait());
    void *y = gpu_get_new(tokens.y, n * 2);
    double error = rel_error(y, dtype, values.out, n);
    cr_expect(error <= tolerance, "%s layer %d in %s: rel_err %g", name, index, epmoe_dtype_string(dtype), error);
    if (experts) {
        int32_t *ids = gpu_get_new(tokens.ids_out, rows * k * 4);
        float *logits = gpu_get_new(tokens.logits_out, rows * experts * 4);
        error = rel_error(logits, EPMOE_F32, values.logits, rows * experts);
        cr_expect(error <= tolerance, "%s layer %d in %s: logits off by %g", name, index, epmoe_dtype_string(dtype),
                  error);
        for (int64_t t = 0; t < rows; t++)
            cr_expect(same_set(ids + t * k, values.ids + t * k, config.top_k),
                      "%s layer %d in %s: token %lld has other experts", name, index, epmoe_dtype_string(dtype),
                      (long long)t);
        free(ids), free(logits);
    }
    free(x), free(y);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    golden_values_free(&values);
}

/* MoE blocks and dense MLPs of every family: fused and separate tensors, transposed and interleaved ones. */
Test(gpu_weights, golden_checkpoints)
{
    GPU_TEST_NEEDS_DEVICE();
    static const char *const names[] = {"mixtral",     "qwen3_moe", "qwen2_moe", "deepseek_v2",
                                        "deepseek_v3", "glm4_moe",  "gpt_oss"};
    int64_t live = epmoei_alloc_live();
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[512];
        epmoe_checkpoint_t *checkpoint = NULL;
        golden_t golden;
        snprintf(path, sizeof path, "%s/golden/%s", EPMOE_TEST_DATA, names[i]);
        cr_assert_eq(epmoe_checkpoint_open(path, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
        snprintf(path, sizeof path, "%s/golden/%s/golden.safetensors", EPMOE_TEST_DATA, names[i]);
        cr_assert_eq(golden_open(path, -1, &golden), EPMOE_OK, "%s", epmoe_last_error());
        cr_expect_eq(golden.num_layers, 2, "%s: %d layers", names[i], golden.num_layers);
        for (int32_t l = 0; l < golden.num_layers; l++) {
            check_block(names[i], checkpoint, &golden.layers[l], EPMOE_BF16, 1e-2);
            check_block(names[i], checkpoint, &golden.layers[l], EPMOE_F16, 2e-3);
        }
        golden_close(&golden);
        epmoe_checkpoint_close(checkpoint);
    }
    cr_expect_eq(epmoei_alloc_live(), live, "%lld allocations are left", (long long)(epmoei_alloc_live() - live));
}

/* ---------------------------------------------------------------------------------------------------------- memory */

/* Everything is given back, also when the n-th allocation of all fails. */
Test(gpu_weights, every_allocation_is_given_back)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config(EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    (void)gpu_stream();
    int64_t live = epmoei_alloc_live();
    int32_t failures = 0;
    bool whole = false;
    for (int64_t n = 1; n < 200 && !whole; n++) {
        epmoe_layer_t *layer = NULL;
        epmoei_alloc_fail_at(n);
        epmoe_status_t created = epmoe_layer_create(&config, NULL, &layer);
        epmoe_status_t random = layer ? epmoe_layer_set_random_weights(layer, 1) : created;
        epmoe_status_t set = layer ? epmoe_layer_set_weights(layer, &model.weights) : created;
        epmoei_alloc_fail_at(0);
        whole = created == EPMOE_OK && random == EPMOE_OK && set == EPMOE_OK;
        epmoe_status_t statuses[] = {created, random, set};
        for (int i = 0; i < 3; i++)
            cr_expect(statuses[i] == EPMOE_OK || statuses[i] == EPMOE_ERROR_OUT_OF_MEMORY, "allocation %lld: %s",
                      (long long)n, epmoe_status_string(statuses[i]));
        cr_expect(created != EPMOE_OK ? layer == NULL : layer != NULL, "allocation %lld", (long long)n);
        if (!whole) failures++;
        if (layer && set == EPMOE_OK) {
            static uint16_t y[kTokens * kD];
            forward(layer, y);
        }
        epmoe_layer_destroy(layer);
        cr_assert_eq(epmoei_alloc_live(), live, "allocation %lld failed: %lld are left", (long long)n,
                     (long long)(epmoei_alloc_live() - live));
    }
    cr_expect(whole);
    cr_expect(failures >= 5, "only %d allocations", failures);
    oracle_model_free(&model);
}
