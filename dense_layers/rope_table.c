/* Tables of cos and sin: which angle a pair of columns turns by per position. Host memory, double precision. */
#include "dense_layers/dense_check.h"

#include <math.h>

#define PI 3.14159265358979323846

/* What is 0 becomes `initial`; then lo <= *value, finite. */
static epmoe_status_t check_number(const char *name, double *value, double initial, double lo)
{
    if (*value == 0) *value = initial;
    if (*value >= lo && isfinite(*value)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %g: expected a finite number from %g", name, *value, lo);
}

static epmoe_status_t check_scaling(epmoe_rope_table_args_t *out)
{
    const double tiny = 0x1p-1000;
    EPMOEI_CHECK(
        epmoei_check_range("scaling", (int32_t)out->scaling, EPMOE_ROPE_SCALING_NONE, EPMOE_ROPE_SCALING_YARN));
    EPMOEI_CHECK(check_number("factor", &out->factor, 1, 1));
    EPMOEI_CHECK(check_number("low_freq_factor", &out->low_freq_factor, 1, tiny));
    EPMOEI_CHECK(check_number("high_freq_factor", &out->high_freq_factor, 4, tiny));
    EPMOEI_CHECK(check_number("beta_fast", &out->beta_fast, 32, tiny));
    EPMOEI_CHECK(check_number("beta_slow", &out->beta_slow, 1, tiny));
    EPMOEI_CHECK(check_number("attention_factor", &out->attention_factor, 0, 0));
    EPMOEI_CHECK(check_number("mscale", &out->mscale, 0, 0));
    EPMOEI_CHECK(check_number("mscale_all_dim", &out->mscale_all_dim, 0, 0));
    EPMOEI_CHECK(epmoei_check_range("no_truncate", out->no_truncate, 0, 1));
    if (out->scaling == EPMOE_ROPE_SCALING_LLAMA3 && out->high_freq_factor < out->low_freq_factor)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "high_freq_factor is %g: expected at least low_freq_factor %g",
                           out->high_freq_factor, out->low_freq_factor);
    if (out->scaling == EPMOE_ROPE_SCALING_LLAMA3 || out->scaling == EPMOE_ROPE_SCALING_YARN)
        return epmoei_check_range("original_positions", out->original_positions, 1, INT32_MAX);
    return EPMOE_OK;
}

static epmoe_status_t check(const epmoe_rope_table_args_t *args, epmoe_rope_table_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_rope_table_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_positions", out->num_positions, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("rotary_dim", out->rotary_dim, 2, INT32_MAX));
    if (out->rotary_dim % 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rotary_dim is %d: expected an even number", out->rotary_dim);
    if (out->base == 0) out->base = 10000;
    if (!(out->base > 1) || !isfinite(out->base))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "base is %g: expected a finite number above 1", out->base);
    EPMOEI_CHECK(check_scaling(out));
    return epmoei_check_pointer("cos_sin", out->cos_sin);
}

static double llama3_frequency(const epmoe_rope_table_args_t *args, double frequency)
{
    double turns = args->original_positions * frequency / (2 * PI);
    double low = args->low_freq_factor, width = args->high_freq_factor - low;
    double blend = width > 0 ? fmin(fmax((turns - low) / width, 0), 1) : turns >= low;
    return (1 - blend) * frequency / args->factor + blend * frequency;
}

/* The pair whose frequency turns `turns` times in the original context, as a real number. */
static double yarn_pair(const epmoe_rope_table_args_t *args, double turns)
{
    return args->rotary_dim * log(args->original_positions / (turns * 2 * PI)) / (2 * log(args->base));
}

static double yarn_frequency(const epmoe_rope_table_args_t *args, double pair, double frequency)
{
    double low = yarn_pair(args, args->beta_fast), high = yarn_pair(args, args->beta_slow);
    if (!args->no_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, args->rotary_dim - 1);
    if (low == high) high += 0.001; /* the published rule for a ramp without width */
    double ramp = fmin(fmax((pair - low) / (high - low), 0), 1);
    return frequency / args->factor * ramp + frequency * (1 - ramp);
}

static double frequency_of(const epmoe_rope_table_args_t *args, int32_t pair)
{
    double frequency = pow(args->base, -2.0 * pair / args->rotary_dim);
    switch (args->scaling) {
    case EPMOE_ROPE_SCALING_LINEAR: return frequency / args->factor;
    case EPMOE_ROPE_SCALING_LLAMA3: return llama3_frequency(args, frequency);
    case EPMOE_ROPE_SCALING_YARN: return yarn_frequency(args, pair, frequency);
    default: return frequency;
    }
}

static double yarn_magnitude(const epmoe_rope_table_args_t *args, double mscale)
{
    return 0.1 * mscale * log(args->factor) + 1;
}

static double attention_factor(const epmoe_rope_table_args_t *args)
{
    if (args->scaling != EPMOE_ROPE_SCALING_YARN) return 1;
    if (args->attention_factor > 0) return args->attention_factor;
    if (args->mscale > 0 && args->mscale_all_dim > 0)
        return yarn_magnitude(args, args->mscale) / yarn_magnitude(args, args->mscale_all_dim);
    return yarn_magnitude(args, 1);
}

epmoe_status_t epmoe_rope_table(const epmoe_rope_table_args_t *args)
{
    epmoe_rope_table_args_t checked;
    EPMOEI_CHECK(check(args, &checked));
    int32_t half = checked.rotary_dim / 2;
    double magnitude = attention_factor(&checked);
#pragma omp parallel for schedule(static) if ((int64_t)half * checked.num_positions >= 4096)
    for (int32_t pair = 0; pair < half; pair++) {
        double frequency = frequency_of(&checked, pair);
        for (int64_t p = 0; p < checked.num_positions; p++) {
            float *row = checked.cos_sin + p * checked.rotary_dim;
            row[pair] = (float)(magnitude * cos((double)p * frequency));
            row[half + pair] = (float)(magnitude * sin((double)p * frequency));
        }
    }
    return EPMOE_OK;
}
