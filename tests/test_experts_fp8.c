/* Experts that quantise x and h, against double precision that quantises at the same two points: codes, scales and sums
 * are worked out here. */
#include "base/fp8.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

enum { kTokens = 24, kTopK = 2, kExperts = 4, kD = 512, kF = 384, kBlock = 128, kSlots = kTokens * kTopK };

typedef struct matrix_t {
    int32_t n, k;
    uint8_t *codes; /* [E,n,k] */
    float *scales;  /* [E,n/128,k/128] */
    double *values; /* [E,n,k] */
} matrix_t;

static matrix_t make_matrix(testing_rng_t *rng, int32_t n, int32_t k)
{
    matrix_t m = {.n = n, .k = k};
    int64_t size = (int64_t)kExperts * n * k, blocks = size / (kBlock * kBlock);
    m.codes = malloc((size_t)size), m.scales = malloc((size_t)blocks * sizeof *m.scales);
    m.values = malloc((size_t)size * sizeof *m.values);
    for (int64_t b = 0; b < blocks; b++) m.scales[b] = testing_uniform(rng, 0.5f, 2) / (16 * sqrtf((float)k));
    for (int64_t row = 0; row < (int64_t)kExperts * n; row++)
        for (int64_t c = 0; c < k; c++) {
            uint8_t code = epmoei_f32_to_e4m3(16 * testing_normal(rng));
            m.codes[row * k + c] = code;
            m.values[row * k + c] =
                (double)epmoei_e4m3_to_f32(code) * (double)m.scales[row / kBlock * (k / kBlock) + c / kBlock];
        }
    return m;
}

static void free_matrix(matrix_t *m) { free(m->codes), free(m->scales), free(m->values); }

static epmoe_weight_t weight_of(const matrix_t *m)
{
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.format = EPMOE_FORMAT_FP8_BLOCK, weight.scales_dtype = EPMOE_F32;
    weight.data = m->codes, weight.scales = m->scales;
    return weight;
}

/* To E4M3 and back, each 128 with the scale that makes their largest 448: 8 steps to an octave from 2^-6 on, below it
 * steps of 2^-9. */
static void quantise(double *row, int32_t n)
{
    for (int32_t first = 0; first < n; first += kBlock) {
        double most = 0;
        for (int32_t i = first; i < first + kBlock; i++) most = fmax(most, fabs(row[i]));
        for (int32_t i = first; i < first + kBlock && most > 0; i++) {
            double scale = most / 448, share = fabs(row[i]) / scale;
            double step = share < 0x1p-6 ? 0x1p-9 : exp2(floor(log2(share)) - 3);
            row[i] = copysign(rint(share / step) * step * scale, row[i]);
        }
    }
}

typedef struct problem_t {
    epmoe_dtype_t dtype;
    matrix_t gate_up, down;
    uint8_t x[kTokens * kD * 4];
    int32_t ids[kSlots];
    float weights[kSlots];
    double h[kSlots][kF]; /* up to its rounding to dtype */
} problem_t;

static problem_t *make(testing_rng_t *rng, epmoe_dtype_t dtype)
{
    problem_t *p = calloc(1, sizeof *p);
    p->dtype = dtype;
    p->gate_up = make_matrix(rng, 2 * kF, kD), p->down = make_matrix(rng, kD, kF);
    testing_fill_normal(rng, p->x, dtype, kTokens * kD, 1);
    for (int s = 0; s < kSlots; s++) {
        p->ids[s] = (s % 2 ? p->ids[s - 1] + testing_range(rng, 1, kExperts - 1) : testing_range(rng, 0, 3)) % kExperts;
        p->weights[s] = testing_uniform(rng, 0.1f, 1);
    }
    for (int s = 0; s < kSlots; s++) {
        double x[kD];
        for (int c = 0; c < kD; c++) x[c] = (double)epmoei_load(p->x, dtype, (int64_t)s / kTopK * kD + c);
        quantise(x, kD);
        const double *w = p->gate_up.values + (int64_t)p->ids[s] * 2 * kF * kD;
        for (int i = 0; i < kF; i++) {
            double gate = 0, up = 0;
            for (int c = 0; c < kD; c++) gate += x[c] * w[i * kD + c], up += x[c] * w[(kF + i) * kD + c];
            p->h[s][i] = gate / (1 + exp(-gate)) * up;
        }
    }
    return p;
}

static void release(problem_t *p)
{
    free_matrix(&p->gate_up), free_matrix(&p->down);
    free(p);
}

/* quantised: whether h is; off: how far arithmetic may lead its values away, either way alike. */
static void finish(const problem_t *p, bool quantised, double off, testing_rng_t *rng, double y[kTokens][kD])
{
    memset(y, 0, sizeof(double) * kTokens * kD);
    for (int s = 0; s < kSlots; s++) {
        double h[kF];
        for (int i = 0; i < kF; i++) {
            float value = (float)(p->h[s][i] * (1 + (off > 0 ? off * (double)testing_uniform(rng, -1, 1) : 0)));
            uint32_t memory;
            epmoei_store(&memory, p->dtype, 0, value);
            h[i] = (double)epmoei_load(&memory, p->dtype, 0);
        }
        if (quantised) quantise(h, kF);
        const double *w = p->down.values + (int64_t)p->ids[s] * kD * kF;
        for (int n = 0; n < kD; n++) {
            double sum = 0;
            for (int i = 0; i < kF; i++) sum += h[i] * w[n * kF + i];
            y[s / kTopK][n] += (double)p->weights[s] * sum;
        }
    }
}

static void run(const problem_t *p, void *y)
{
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = kTokens, args.top_k = kTopK, args.num_experts = kExperts;
    args.hidden = kD, args.intermediate = kF, args.dtype = p->dtype;
    args.x = p->x, args.ids = p->ids, args.weights = p->weights, args.y = y;
    args.gate_up = weight_of(&p->gate_up), args.down = weight_of(&p->down);
    args.layout = EPMOE_LAYOUT_GATE_FIRST;
    args.fp8_activations = 1;
    cr_assert_eq(epmoe_experts_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = testing_buffer(args.workspace_bytes, 0);
    cr_assert_eq(epmoe_experts(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(args.workspace) && testing_guards_intact(y));
    testing_buffer_free(args.workspace);
}

static const struct {
    epmoe_dtype_t dtype;
    double rounding; /* of y: what remains in the root mean square where every code is the same */
} types[] = {{EPMOE_F32, 2e-7}, {EPMOE_BF16, 1.7e-3}, {EPMOE_F16, 2.1e-4}};

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Arithmetic may lead one h to the other of two codes, or the largest of a block, and with it the block's scale, to the
 * next bf16; so the median of a few problems counts. x's codes do not depend on arithmetic. Without quantising h the
 * reference is off by several times what is allowed. */
Test(experts_fp8, quantises_x_and_h)
{
    enum { kProblems = 5 };
    testing_rng_t rng = testing_rng(testing_seed());
    static double expected[kTokens][kD];
    for (int i = 0; i < 3; i++) {
        double errors[kProblems];
        for (int j = 0; j < kProblems; j++) {
            problem_t *p = make(&rng, types[i].dtype);
            void *y = testing_buffer(kTokens * kD * epmoe_dtype_size(p->dtype), 0);
            run(p, y);
            finish(p, true, 0, &rng, expected);
            errors[j] = testing_rel_error(y, p->dtype, expected[0], kTokens * kD);
            finish(p, false, 0, &rng, expected);
            double error = testing_rel_error(y, p->dtype, expected[0], kTokens * kD);
            cr_expect(error > 1.5e-2 && error < 4e-2, "%s, h as it is: %g", epmoe_dtype_string(p->dtype), error);
            testing_buffer_free(y);
            release(p);
        }
        for (int j = 0; j < kProblems; j++) cr_assert(isfinite(errors[j]));
        qsort(errors, kProblems, sizeof errors[0], ascending);
        cr_expect_leq(errors[kProblems / 2], types[i].rounding + 4e-3, "%s: %g", epmoe_dtype_string(types[i].dtype),
                      errors[kProblems / 2]);
    }
}

/* What another backend may differ by: where h comes from sums of 13 bits, as tensor cores keep them, a code in a few
 * hundred is its neighbour. In the root mean square over draws that is below 1e-2; a single value may be further
 * off, for a step is up to an eighth of an h, which may be the largest of its row, and so may a call of few tokens. */
Test(experts_fp8, codes_that_fall_the_other_way)
{
    enum { kDraws = 12 };
    testing_rng_t rng = testing_rng(testing_seed());
    static double same[kTokens][kD], other[kTokens][kD];
    for (int i = 0; i < 3; i++) {
        problem_t *p = make(&rng, types[i].dtype);
        double off = 0, size = 0, most = 0;
        finish(p, true, 0, &rng, same);
        for (int draw = 0; draw < kDraws; draw++) {
            finish(p, true, 0x1p-13, &rng, other);
            for (int t = 0; t < kTokens; t++) {
                double row = 0;
                for (int c = 0; c < kD; c++) row += same[t][c] * same[t][c];
                for (int c = 0; c < kD; c++) {
                    double difference = fabs(other[t][c] - same[t][c]);
                    off += difference * difference;
                    most = fmax(most, difference / (fabs(same[t][c]) + sqrt(row / kD)));
                }
                size += row;
            }
        }
        double error = sqrt(off / size);
        cr_expect(error > 2e-4 && error < 1e-2, "%s: %g", epmoe_dtype_string(p->dtype), error);
        cr_expect(most > 2 * error, "%s: a value by %g, all by %g", epmoe_dtype_string(p->dtype), most, error);
        release(p);
    }
}
