/* Where the shared expert runs as one more of the routed ones, and where its matrices then lie: as a layer on CUDA
 * plans it, which takes no device. */
#include "base/device.h"
#include "base/dtype.h"
#include "moe/layer_joined.h"
#include "tests/testing.h"

#include <criterion/criterion.h>

enum { kE = 9, kD = 256, kF = 128 };

static epmoe_layer_config_t config_of(epmoe_format_t format)
{
    epmoe_layer_config_t raw = EPMOE_LAYER_CONFIG_INIT, config;
    raw.hidden = kD, raw.intermediate = raw.shared_intermediate = kF;
    raw.num_experts = kE, raw.top_k = 3;
    raw.max_tokens = 40;
    raw.weight_format = format;
    cr_assert_eq(epmoei_layer_config_check(&raw, &config), EPMOE_OK, "%s", epmoe_last_error());
    return config;
}

static bool joins(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts)
{
    const epmoei_layer_formats_t formats = epmoei_layer_config_formats(config);
    return epmoei_layer_joins_shared(config, backend, local_experts, &formats);
}

static const epmoe_format_t formats[] = {EPMOE_FORMAT_BF16, EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_GPTQ,
                                         EPMOE_FORMAT_CT_W4, EPMOE_FORMAT_MXFP4};
enum { kFormats = sizeof formats / sizeof formats[0] };

Test(layer_joined, where_the_shared_expert_joins)
{
    for (int i = 0; i < kFormats; i++) {
        const epmoe_layer_config_t config = config_of(formats[i]);
        cr_expect(joins(&config, EPMOE_BACKEND_CUDA, kE), "%s", epmoe_format_string(formats[i]));
        cr_expect(!joins(&config, EPMOE_BACKEND_CPU, kE), "%s", epmoe_format_string(formats[i]));
        cr_expect(!joins(&config, EPMOE_BACKEND_CUDA, kE - 1), "%s", epmoe_format_string(formats[i]));
    }
}

Test(layer_joined, what_keeps_it_apart)
{
    static const int32_t placement[kE] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
#define APART(change)                                                                                                  \
    do {                                                                                                               \
        epmoe_layer_config_t config = config_of(EPMOE_FORMAT_BF16);                                                    \
        change;                                                                                                        \
        cr_expect(!joins(&config, EPMOE_BACKEND_CUDA, config.num_experts), "%s", #change);                             \
    } while (0)
    APART(config.shared_intermediate = 0);
    APART(config.shared_intermediate = kF + 8);
    APART(config.shared_gated = 1);
    APART(config.expert_has_bias = 1);
    APART(config.wire_dtype = EPMOE_F8_E4M3);
    APART(config.placement = placement);
    APART((config.num_experts = config.top_k = 1));
    APART((config.num_experts = 64, config.top_k = EPMOE_MAX_TOP_K));
    APART(config.num_experts = 512);
    APART(config.max_tokens = INT32_MAX / 3);
#undef APART
    /* The limits themselves. */
    epmoe_layer_config_t config = config_of(EPMOE_FORMAT_BF16);
    config.num_experts = 511, config.top_k = EPMOE_MAX_TOP_K - 1, config.max_tokens = INT32_MAX / EPMOE_MAX_TOP_K;
    cr_expect(joins(&config, EPMOE_BACKEND_CUDA, 511));
}

Test(layer_joined, other_formats_keep_it_apart)
{
#define APART(format, change)                                                                                          \
    do {                                                                                                               \
        const epmoe_layer_config_t config = config_of(format);                                                         \
        epmoei_layer_formats_t own = epmoei_layer_config_formats(&config);                                             \
        change;                                                                                                        \
        cr_expect(!epmoei_layer_joins_shared(&config, EPMOE_BACKEND_CUDA, kE, &own), "%s", #change);                   \
    } while (0)
    APART(EPMOE_FORMAT_BF16, own.shared_gate_up = EPMOE_FORMAT_FP8_BLOCK);
    APART(EPMOE_FORMAT_FP8_BLOCK, own.shared_down = EPMOE_FORMAT_BF16);
    APART(EPMOE_FORMAT_FP8_BLOCK, own.shared_down_pack.group = 64);
    APART(EPMOE_FORMAT_FP8_BLOCK, own.shared_gate_up_pack.row_group = 1);
    APART(EPMOE_FORMAT_FP8_BLOCK, own.shared_gate_up_pack.scales_dtype = EPMOE_BF16);
    APART(EPMOE_FORMAT_GPTQ, own.shared_gate_up_pack.zeros = false);
    APART(EPMOE_FORMAT_GPTQ, own.down_pack.order = true);
    /* Borrowed matrices, which are the caller's. */
    APART(EPMOE_FORMAT_BF16, own.gate_up = own.down = own.shared_gate_up = own.shared_down = EPMOE_FORMAT_NONE);
#undef APART
}

static void expect_behind(const char *what, const void *shared, const void *all, int64_t bytes)
{
    const char *expected = all ? (const char *)all + kE * bytes : NULL;
    cr_expect(shared == (const void *)expected && (all != NULL) == (bytes > 0), "%s: %p is not %p", what, shared,
              (const void *)expected);
}

static void expect_matrix(epmoe_format_t format, const epmoei_pack_shape_t *pack, int64_t rows, int64_t cols,
                          bool halves, const void *shared, const epmoei_pack_arrays_t *shared_arrays, const void *all,
                          const epmoei_pack_arrays_t *arrays)
{
    const epmoei_matrix_sizes_t sizes = epmoei_matrix_sizes(EPMOE_BACKEND_CUDA, format, pack, rows, cols, halves);
    const char *name = epmoe_format_string(format);
    expect_behind(name, shared, all, sizes.data);
    expect_behind(name, shared_arrays->scales, arrays->scales, sizes.scales);
    expect_behind(name, shared_arrays->zeros, arrays->zeros, sizes.zeros);
    expect_behind(name, shared_arrays->order, arrays->order, sizes.order);
}

/* In the arrays of the others, with room there, and nowhere else. */
Test(layer_joined, its_matrices_lie_behind_the_others)
{
    for (int i = 0; i < kFormats; i++) {
        const epmoe_layer_config_t config = config_of(formats[i]);
        epmoei_layer_formats_t own = epmoei_layer_config_formats(&config);
        own.down_pack.order = own.shared_down_pack.order = own.down == EPMOE_FORMAT_W4;
        epmoei_packed_weights_t w, counted;
        const int64_t bytes = epmoei_layer_weights_layout(NULL, &config, EPMOE_BACKEND_CUDA, kE, &own, &counted);
        char *memory = testing_buffer(bytes, 0);
        cr_assert_eq(epmoei_layer_weights_layout(memory, &config, EPMOE_BACKEND_CUDA, kE, &own, &w), bytes);
        cr_assert(w.joins_shared && counted.joins_shared);
        expect_matrix(own.gate_up, &own.gate_up_pack, 2 * kF, kD, true, w.shared_gate_up, &w.shared_gate_up_arrays,
                      w.gate_up, &w.gate_up_arrays);
        expect_matrix(own.down, &own.down_pack, kD, kF, false, w.shared_down, &w.shared_down_arrays, w.down,
                      &w.down_arrays);
        /* The last byte of the shared expert's matrices is inside: no array begins before it. */
        const epmoei_matrix_sizes_t down =
            epmoei_matrix_sizes(EPMOE_BACKEND_CUDA, own.down, &own.down_pack, kD, kF, false);
        cr_expect_leq((char *)w.shared_down + down.data - memory, bytes);
        if (w.down_arrays.scales) cr_expect_leq((void *)((char *)w.shared_down + down.data), w.down_arrays.scales);

        epmoe_layer_config_t apart = config;
        apart.shared_gated = 1;
        epmoei_layer_weights_layout(memory, &apart, EPMOE_BACKEND_CUDA, kE, &own, &w);
        cr_expect(!w.joins_shared && (char *)w.shared_gate_up > (char *)w.down);
        testing_buffer_free(memory);
    }
}

/* 4-bit weights run apart in calls of some tokens, for which a layer then keeps what a shared expert of its own needs.
 */
Test(layer_joined, calls_in_which_it_runs_apart)
{
    static const struct {
        int32_t tokens;
        bool joined, always;
    } calls[] = {{1, true, true}, {64, true, true}, {65, false, false}, {256, false, false}, {257, true, false}};
    for (int i = 0; i < kFormats; i++)
        for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++) {
            epmoe_layer_config_t config = config_of(formats[i]);
            config.max_tokens = calls[c].tokens;
            const epmoei_layer_formats_t own = epmoei_layer_config_formats(&config);
            epmoei_packed_weights_t w;
            epmoei_layer_weights_layout(NULL, &config, EPMOE_BACKEND_CUDA, kE, &own, &w);
            const bool four_bits = own.gate_up == EPMOE_FORMAT_W4 || own.gate_up == EPMOE_FORMAT_MXFP4;
            cr_expect_eq(epmoei_layer_joins_tokens(&w, calls[c].tokens), !four_bits || calls[c].joined, "%s, %d tokens",
                         epmoe_format_string(own.gate_up), calls[c].tokens);
            cr_expect_eq(epmoei_layer_joins_always(&w, calls[c].tokens), !four_bits || calls[c].always,
                         "%s, at most %d tokens", epmoe_format_string(own.gate_up), calls[c].tokens);
            w.joins_shared = false;
            cr_expect(!epmoei_layer_joins_tokens(&w, 1) && !epmoei_layer_joins_always(&w, 1));
        }
}
