/* What a few huge elements cost the others when activations become E4M3, by granularity: nothing while the others stay
 * within its exponents, and a fixed step where the scale pushes them below. Expected errors come from the steps of the
 * type and the largest element of what shares a scale, both worked out here. */
#include "base/fp8.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

enum { kRows = 64, kColumns = 512, kBlock = 128, kOutputs = 128 };

/* Even rows are loud, with a standard deviation of 1, odd ones quiet. */
#define QUIET 0x1p-8

/* One of each kind of row has an outlier, in a block of its own. */
enum { kLoudOutlier = 20, kQuietOutlier = 41, kLoudColumn = 130, kQuietColumn = 400 };

typedef struct data_t {
    float x[kRows][kColumns];
    float rounded[kRows][kColumns];          /* x, quantised and back */
    double expected_square[kRows][kColumns]; /* of its error */
} data_t;

static bool is_outlier(int64_t row, int64_t column)
{
    return (row == kLoudOutlier && column == kLoudColumn) || (row == kQuietOutlier && column == kQuietColumn);
}

/* The outliers are their rows' largest elements times `factor`. */
static data_t *make(testing_rng_t *rng, float factor)
{
    data_t *data = calloc(1, sizeof *data);
    for (int64_t r = 0; r < kRows; r++)
        testing_fill_normal(rng, data->x[r], EPMOE_F32, kColumns, r % 2 ? (float)QUIET : 1);
    data->x[kLoudOutlier][kLoudColumn] = 3.5f * factor;
    data->x[kQuietOutlier][kQuietColumn] = -3.5f * (float)QUIET * factor;
    return data;
}

static double largest(const data_t *data, int64_t first_row, int64_t end_row, int64_t first, int64_t end)
{
    double most = 0;
    for (int64_t r = first_row; r < end_row; r++)
        for (int64_t c = first; c < end; c++) most = fmax(most, fabs((double)data->x[r][c]));
    return most;
}

/* The scale of each row and block, from what shares it. */
static void find_scales(const data_t *data, epmoe_granularity_t granularity, double scales[kRows][kColumns / kBlock])
{
    double of_all = largest(data, 0, kRows, 0, kColumns);
    for (int64_t r = 0; r < kRows; r++)
        for (int64_t b = 0; b < kColumns / kBlock; b++)
            scales[r][b] =
                (granularity == EPMOE_GRANULARITY_TENSOR  ? of_all
                 : granularity == EPMOE_GRANULARITY_TOKEN ? largest(data, r, r + 1, 0, kColumns)
                                                          : largest(data, r, r + 1, b * kBlock, (b + 1) * kBlock)) /
                448;
}

/* From 2^-6 to 448 there are 8 steps to an octave, below 2^-6 all are 2^-9. A value below half of that is lost as a
 * whole, of the others the error is even within half a step to both sides. */
static double expected_square(double value, double scale)
{
    double share = fabs(value) / scale;
    if (share < 0x1p-10) return value * value;
    double step = share < 0x1p-6 ? 0x1p-9 : exp2(floor(log2(share)) - 3);
    return step * step * scale * scale / 12;
}

static void quantise(data_t *data, epmoe_granularity_t granularity)
{
    static uint8_t codes[kRows][kColumns];
    static float scales[kRows * kColumns / kBlock];
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = kRows, args.hidden = kColumns, args.dtype = EPMOE_F32, args.granularity = granularity;
    args.x = data->x, args.q = codes[0], args.scale = scales;
    memset(codes, 0x7F, sizeof codes);
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    double expected[kRows][kColumns / kBlock];
    find_scales(data, granularity, expected);
    for (int64_t r = 0; r < kRows; r++)
        for (int64_t c = 0; c < kColumns; c++) {
            int64_t at = granularity == EPMOE_GRANULARITY_TENSOR  ? 0
                         : granularity == EPMOE_GRANULARITY_TOKEN ? r
                                                                  : r * (kColumns / kBlock) + c / kBlock;
            data->rounded[r][c] = epmoei_e4m3_to_f32(codes[r][c]) * scales[at];
            data->expected_square[r][c] =
                is_outlier(r, c) ? 0 : expected_square((double)data->x[r][c], expected[r][c / kBlock]);
        }
}

/* ---------------------------------------------------------------------------------------------------------- classes */

typedef enum part_t { LOUD, QUIET_ROWS, LOUD_BLOCK, LOUD_ROW, QUIET_BLOCK, QUIET_ROW, NUM_PARTS } part_t;
static const char *const part_names[] = {
    "loud rows",          "quiet rows", "a loud outlier's block", "the rest of its row", "a quiet outlier's block",
    "the rest of its row"};

static part_t part_of(int64_t row, int64_t column)
{
    if (row == kLoudOutlier) return column / kBlock == kLoudColumn / kBlock ? LOUD_BLOCK : LOUD_ROW;
    if (row == kQuietOutlier) return column / kBlock == kQuietColumn / kBlock ? QUIET_BLOCK : QUIET_ROW;
    return row % 2 ? QUIET_ROWS : LOUD;
}

/* |error| / |x| of each part, measured and expected, the outliers themselves left out. */
typedef struct errors_t {
    double measured[NUM_PARTS], expected[NUM_PARTS];
} errors_t;

static errors_t errors_of(const data_t *data)
{
    double error[NUM_PARTS] = {0}, expected[NUM_PARTS] = {0}, size[NUM_PARTS] = {0};
    for (int64_t r = 0; r < kRows; r++)
        for (int64_t c = 0; c < kColumns; c++) {
            if (is_outlier(r, c)) continue;
            double x = (double)data->x[r][c], off = (double)data->rounded[r][c] - x;
            part_t part = part_of(r, c);
            error[part] += off * off, expected[part] += data->expected_square[r][c], size[part] += x * x;
        }
    errors_t errors;
    for (int p = 0; p < NUM_PARTS; p++) {
        errors.measured[p] = sqrt(error[p] / size[p]);
        errors.expected[p] = sqrt(expected[p] / size[p]);
    }
    return errors;
}

/* Steps are between 1/16 and 1/8 of a value within the exponents, and an error's root mean square is a step's over the
 * root of 12. */
static bool in_range(double error) { return error > 1 / (16 * sqrt(12)) && error < 1 / (8 * sqrt(12)); }

static errors_t run(testing_rng_t *rng, float factor, epmoe_granularity_t granularity)
{
    data_t *data = make(rng, factor);
    quantise(data, granularity);
    errors_t errors = errors_of(data);
    for (int p = 0; p < NUM_PARTS; p++) {
        /* The root mean square of n errors is off by some 0.45 / sqrt(n) of itself, and by twice that where the largest
         * elements decide; parts have 15,000 or 127. Eight times that. */
        double margin = p <= QUIET_ROWS ? 1.06 : 1.5, ratio = errors.measured[p] / errors.expected[p];
        cr_expect(ratio < margin && ratio > 1 / margin, "granularity %d, times %g, %s: %g, expected %g", granularity,
                  (double)factor, part_names[p], errors.measured[p], errors.expected[p]);
    }
    for (int i = 0; i < 2; i++) {
        int64_t r = i ? kQuietOutlier : kLoudOutlier, c = i ? kQuietColumn : kLoudColumn;
        double x = (double)data->x[r][c], off = fabs((double)data->rounded[r][c] - x);
        /* Alone under its scale it is 448 of it. */
        bool largest_of_all = i == 0 || granularity != EPMOE_GRANULARITY_TENSOR;
        cr_expect(off <= (largest_of_all ? 0x1p-22 : 0x1p-4) * fabs(x), "times %g: %g became %g", (double)factor, x,
                  (double)data->rounded[r][c]);
    }
    free(data);
    return errors;
}

/* Of an integer type with 8 bits a hundredfold element would leave the others 1 or 2 bits. E4M3 has 15 octaves at full
 * precision: the loud rows lose nothing. Quiet ones under the same scale are below them and have its fixed step. */
Test(outliers, a_hundredfold)
{
    testing_rng_t rng = testing_rng(testing_seed());
    errors_t tensor = run(&rng, 100, EPMOE_GRANULARITY_TENSOR), token = run(&rng, 100, EPMOE_GRANULARITY_TOKEN);
    errors_t block = run(&rng, 100, EPMOE_GRANULARITY_BLOCK128);
    for (int p = 0; p < NUM_PARTS; p++) {
        bool quiet = p == QUIET_ROWS || p == QUIET_BLOCK || p == QUIET_ROW;
        cr_expect(in_range(token.measured[p]) && in_range(block.measured[p]), "%s: per token %g, per block %g",
                  part_names[p], token.measured[p], block.measured[p]);
        cr_expect_eq(in_range(tensor.measured[p]), !quiet, "%s: per tensor %g", part_names[p], tensor.measured[p]);
    }
    /* Six standard deviations of a quiet row are below the first octave with a longer step. */
    double step = 350.0 / 448 * 0x1p-9, expected = step / sqrt(12) / QUIET;
    cr_expect_float_eq(tensor.measured[QUIET_ROWS] / expected, 1, 0.05, "%g", tensor.measured[QUIET_ROWS]);
    cr_expect_gt(tensor.measured[QUIET_ROWS], 4 * token.measured[QUIET_ROWS]);
}

/* An element as models have them at the first token, which leaves its scale's others the fixed step: all rows per
 * tensor, its row per token, its block per block. Quiet rows are nothing at all beside a loud row's. */
Test(outliers, a_massive_one)
{
    const float factor = 25600;
    testing_rng_t rng = testing_rng(testing_seed());
    errors_t tensor = run(&rng, factor, EPMOE_GRANULARITY_TENSOR), token = run(&rng, factor, EPMOE_GRANULARITY_TOKEN);
    errors_t block = run(&rng, factor, EPMOE_GRANULARITY_BLOCK128);
    /* Parts of 127 elements have as wide a margin as above. */
    const double least[] = {0.7, 0.65}, most[] = {1.3, 1.5};
    double fixed_step = 3.5 * 25600 / 448 * 0x1p-9 / sqrt(12); /* of a loud row; a quiet row's is QUIET of it */
    for (int p = 0; p < NUM_PARTS; p++) {
        bool quiet = p == QUIET_ROWS || p == QUIET_BLOCK || p == QUIET_ROW;
        const bool few = p > QUIET_ROWS;
        const double low = least[few] * fixed_step, high = most[few] * fixed_step;
        bool own_row = p > QUIET_ROWS, own_block = p == LOUD_BLOCK || p == QUIET_BLOCK;
        /* Some values are less than half a step: they lose less. */
        if (quiet)
            cr_expect_float_eq(tensor.measured[p], 1, 1e-6, "%s: per tensor %g", part_names[p], tensor.measured[p]);
        else
            cr_expect(tensor.measured[p] > low && tensor.measured[p] < high, "%s: per tensor %g, the step is %g",
                      part_names[p], tensor.measured[p], fixed_step);
        const double measured[] = {token.measured[p], block.measured[p]};
        for (int i = 0; i < 2; i++) {
            bool spoilt = i ? own_block : own_row;
            cr_expect(spoilt ? measured[i] > low && measured[i] < high : in_range(measured[i]), "%s: per %s %g",
                      part_names[p], i ? "block" : "token", measured[i]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------- through a product
 */

/* Two experts, the rows of one before those of the other; weights of one scale for all. */
typedef struct product_t {
    uint8_t codes[2][kOutputs][kColumns];
    float scale[2];
    int32_t offsets[3];
    float y[kRows][kOutputs];
} product_t;

static product_t *make_product(testing_rng_t *rng)
{
    product_t *product = calloc(1, sizeof *product);
    for (int i = 0; i < 2 * kOutputs; i++)
        for (int c = 0; c < kColumns; c++)
            product->codes[i / kOutputs][i % kOutputs][c] = epmoei_f32_to_e4m3(16 * testing_normal(rng));
    product->scale[0] = 0x1p-4f, product->scale[1] = 0x1p-3f;
    product->offsets[1] = 30, product->offsets[2] = kRows;
    return product;
}

static void multiply(product_t *product, const void *x, int32_t fp8_activations)
{
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 2, args.n = kOutputs, args.k = kColumns, args.max_rows = kRows;
    args.expert_offsets = product->offsets;
    args.x_dtype = args.y_dtype = EPMOE_F32;
    args.x = x, args.y = product->y;
    args.weight.format = EPMOE_FORMAT_FP8_BLOCK, args.weight.group_size = -1;
    args.weight.data = product->codes, args.weight.scales = product->scale, args.weight.scales_dtype = EPMOE_F32;
    args.activation = EPMOE_ACTIVATION_NONE;
    args.fp8_activations = fp8_activations;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = testing_buffer(args.workspace_bytes + 8, 0);
    memset(product->y, 0x7F, sizeof product->y);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    testing_buffer_free(args.workspace);
}

/* Rounding errors have no sign of their own: the square of an output's error is the sum of theirs, each times the
 * square of its weight. */
static void product_errors(const data_t *data, const product_t *product, int64_t row, double *measured,
                           double *expected)
{
    int expert = row >= product->offsets[1];
    double off = 0, square = 0;
    for (int n = 0; n < kOutputs; n++) {
        double exact = 0;
        for (int c = 0; c < kColumns; c++) {
            double w = (double)epmoei_e4m3_to_f32(product->codes[expert][n][c]) * (double)product->scale[expert];
            exact += w * (double)data->x[row][c];
            square += w * w * data->expected_square[row][c];
        }
        off += ((double)product->y[row][n] - exact) * ((double)product->y[row][n] - exact);
    }
    *measured = sqrt(off), *expected = sqrt(square);
}

/* Activations that the op has quantised, and per block also those that the product quantises itself. */
Test(outliers, through_a_grouped_gemm)
{
    static const float factors[] = {100, 25600};
    testing_rng_t rng = testing_rng(testing_seed());
    product_t *product = make_product(&rng);
    double errors[2][5][2][NUM_PARTS] = {0};
    for (int f = 0; f < 2; f++)
        for (int g = EPMOE_GRANULARITY_TENSOR; g <= EPMOE_GRANULARITY_BLOCK128 + 1; g++) {
            bool by_product = g > EPMOE_GRANULARITY_BLOCK128;
            data_t *data = make(&rng, factors[f]);
            quantise(data, by_product ? EPMOE_GRANULARITY_BLOCK128 : (epmoe_granularity_t)g);
            multiply(product, by_product ? data->x[0] : data->rounded[0], by_product);
            double(*sum)[NUM_PARTS] = errors[f][g];
            for (int64_t r = 0; r < kRows; r++) {
                double measured, expected;
                product_errors(data, product, r, &measured, &expected);
                part_t part = r == kLoudOutlier ? LOUD_ROW : r == kQuietOutlier ? QUIET_ROW : part_of(r, 0);
                sum[0][part] += measured * measured, sum[1][part] += expected * expected;
            }
            for (int p = 0; p < NUM_PARTS; p++) {
                if (p == LOUD_BLOCK || p == QUIET_BLOCK) continue;
                /* One row's 128 outputs are 128 sums of the same errors, and a part's 31 rows thirty times as many. */
                double ratio = sqrt(sum[0][p] / sum[1][p]), margin = p <= QUIET_ROWS ? 1.1 : 1.5;
                cr_expect(ratio < margin && ratio > 1 / margin, "times %g, granularity %d, %s: %g times the expected",
                          (double)factors[f], g, part_names[p], ratio);
            }
            free(data);
        }
    /* Of the rows without an outlier only those under the tensor's one scale feel it. */
    double tensor = sqrt(errors[0][EPMOE_GRANULARITY_TENSOR][0][QUIET_ROWS]);
    cr_expect_gt(tensor, 4 * sqrt(errors[0][EPMOE_GRANULARITY_TOKEN][0][QUIET_ROWS]));
    for (int g = EPMOE_GRANULARITY_TOKEN; g <= EPMOE_GRANULARITY_BLOCK128 + 1; g++)
        for (int p = LOUD; p <= QUIET_ROWS; p++)
            cr_expect_float_eq(sqrt(errors[1][g][0][p] / errors[0][g][0][p]), 1, 0.15, "granularity %d, %s: %g and %g",
                               g, part_names[p], errors[0][g][0][p], errors[1][g][0][p]);
    free(product);
}
