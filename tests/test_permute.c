/* Permute and unpermute: hand-worked rows, naive copies, a double-precision way back, errors. */
#include "kernels/permute.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>

/* Runs the public entry and compares both kernels with it, byte for byte, poison included. */
static void run_permute(const epmoe_permute_args_t *args)
{
    int64_t y_bytes = (int64_t)args->max_rows * args->hidden * epmoe_dtype_size(args->dtype);
    int64_t inverse_bytes = 4 * (int64_t)args->num_tokens * args->top_k;
    epmoe_status_t (*const kernels[])(const epmoe_permute_args_t *, epmoe_stream_t) = {epmoei_permute_ref,
                                                                                       epmoei_permute_cpu};
    cr_assert_eq(epmoe_permute(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        epmoe_permute_args_t checked;
        cr_assert_eq(epmoei_permute_check(args, &checked), EPMOE_OK);
        checked.y = testing_buffer(y_bytes, 0);
        checked.inverse = args->inverse ? testing_buffer(inverse_bytes, 0) : NULL;
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        cr_assert(y_bytes == 0 || !memcmp(checked.y, args->y, (size_t)y_bytes), "y of kernel %d differs", i);
        cr_assert(!args->inverse || !memcmp(checked.inverse, args->inverse, (size_t)inverse_bytes));
        cr_assert(testing_guards_intact(checked.y));
        cr_assert(!args->inverse || testing_guards_intact(checked.inverse));
        testing_buffer_free(checked.y);
        testing_buffer_free(checked.inverse);
    }
}

static void run_unpermute(const epmoe_unpermute_args_t *args)
{
    int64_t n = (int64_t)args->num_tokens * args->hidden;
    epmoe_status_t (*const kernels[])(const epmoe_unpermute_args_t *, epmoe_stream_t) = {epmoei_unpermute_ref,
                                                                                         epmoei_unpermute_cpu};
    cr_assert_eq(epmoe_unpermute(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        epmoe_unpermute_args_t checked;
        cr_assert_eq(epmoei_unpermute_check(args, &checked), EPMOE_OK);
        checked.out = testing_buffer(n * epmoe_dtype_size(args->dtype), 0);
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        cr_assert(op_same_bits(checked.out, args->out, args->dtype, n), "kernel %d differs", i);
        cr_assert(testing_guards_intact(checked.out));
        testing_buffer_free(checked.out);
    }
}

static epmoe_permute_args_t make_permute(int32_t num_tokens, int32_t top_k, int32_t hidden, epmoe_dtype_t dtype,
                                         int32_t max_rows)
{
    epmoe_permute_args_t args = EPMOE_PERMUTE_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.top_k = top_k;
    args.hidden = hidden;
    args.dtype = dtype;
    args.max_rows = max_rows;
    return args;
}

static epmoe_unpermute_args_t make_unpermute(int32_t num_tokens, int32_t top_k, int32_t hidden, epmoe_dtype_t dtype,
                                             int32_t max_rows)
{
    epmoe_unpermute_args_t args = EPMOE_UNPERMUTE_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.top_k = top_k;
    args.hidden = hidden;
    args.dtype = dtype;
    args.max_rows = max_rows;
    return args;
}

Test(permute, by_hand)
{
    /* Slots 1 and 4 of three tokens with two slots each, in blocks of two; 6 is the pad value. */
    const float x[] = {1, 2, 3, 4, 5, 6};
    const int32_t sorted_ids[] = {1, 6, 4, 6, 6, 6}, num_rows = 4, expected_inverse[] = {-1, 0, -1, -1, 2, -1};
    const float expected[] = {1, 2, 0, 0, 5, 6, 0, 0};
    float *y = testing_buffer(6 * 2 * 4, 4);
    int32_t *inverse = testing_buffer(6 * 4, 4);
    epmoe_permute_args_t args = make_permute(3, 2, 2, EPMOE_F32, 6);
    args.x = x, args.sorted_ids = sorted_ids, args.num_rows = &num_rows, args.y = y, args.inverse = inverse;
    run_permute(&args);
    cr_assert_eq(memcmp(y, expected, sizeof expected), 0);
    cr_assert(testing_is_poison(y, 32, 16), "rows from num_rows on are not written");
    cr_assert_eq(memcmp(inverse, expected_inverse, sizeof expected_inverse), 0);
    cr_assert(testing_guards_intact(y) && testing_guards_intact(inverse));

    /* And back: token 1 has no slot, and neither weights nor padding rows are looked at for it. */
    const float weights[] = {NAN, 0.5f, NAN, NAN, 2, NAN}, back[] = {0.5f, 1, 0, 0, 10, 12};
    y[2] = y[3] = y[6] = y[7] = NAN;
    float *out = testing_buffer(3 * 2 * 4, 4);
    epmoe_unpermute_args_t un = make_unpermute(3, 2, 2, EPMOE_F32, 6);
    un.y = y, un.inverse = inverse, un.weights = weights, un.out = out;
    run_unpermute(&un);
    cr_assert_eq(memcmp(out, back, sizeof back), 0);
    cr_assert(testing_guards_intact(out));
    un.weights = NULL;
    run_unpermute(&un);
    cr_assert(out[0] == 1 && out[1] == 2 && out[2] == 0 && out[3] == 0 && out[4] == 5 && out[5] == 6);
    testing_buffer_free(y), testing_buffer_free(inverse), testing_buffer_free(out);
}

Test(permute, nothing_local_still_writes_the_inverse)
{
    const int32_t num_rows = 0;
    int32_t *inverse = testing_buffer(6 * 4, 0);
    float *out = testing_buffer(3 * 4 * 4, 0);
    epmoe_permute_args_t args = make_permute(3, 2, 4, EPMOE_F32, 0);
    args.num_rows = &num_rows, args.inverse = inverse;
    run_permute(&args);
    for (int32_t s = 0; s < 6; s++) cr_assert_eq(inverse[s], -1);
    epmoe_unpermute_args_t un = make_unpermute(3, 2, 4, EPMOE_F32, 0);
    un.inverse = inverse, un.out = out;
    run_unpermute(&un);
    for (int32_t i = 0; i < 12; i++) cr_assert_eq(out[i], 0);
    testing_buffer_free(inverse), testing_buffer_free(out);
}

/* Random rows through permute and back, with align's own kind of list: slots in any order, some padding between. */
static void round_trip(testing_rng_t *rng, epmoe_dtype_t dtype, int32_t num_tokens, int32_t top_k, int32_t hidden)
{
    int32_t size = epmoe_dtype_size(dtype), num_slots = num_tokens * top_k, max_rows = 2 * num_slots + 3, rows = 0;
    int64_t row_bytes = (int64_t)hidden * size;
    unsigned char *x = testing_buffer(num_tokens * row_bytes, size);
    unsigned char *y = testing_buffer(max_rows * row_bytes, size);
    int32_t *sorted_ids = testing_buffer(4 * (int64_t)max_rows, 4),
            *inverse = testing_buffer(4 * (int64_t)num_slots, 4);
    int32_t *order = malloc(4 * (size_t)num_slots), *place = malloc(4 * (size_t)num_slots);
    if (epmoei_dtype_is_float(dtype))
        testing_fill_normal(rng, x, dtype, (int64_t)num_tokens * hidden, 1);
    else
        for (int64_t i = 0; i < num_tokens * row_bytes; i++) x[i] = (unsigned char)testing_next(rng);
    for (int32_t s = 0; s < num_slots; s++) order[s] = s, place[s] = -1;
    for (int32_t s = num_slots - 1; s > 0; s--) {
        int32_t other = testing_range(rng, 0, s), kept = order[s];
        order[s] = order[other];
        order[other] = kept;
    }
    for (int32_t i = 0; i < num_slots; i++) {
        if (testing_range(rng, 0, 3) == 0) sorted_ids[rows++] = num_slots; /* padding */
        if (testing_range(rng, 0, 5) == 0) continue;                       /* a slot that takes no part */
        place[order[i]] = rows;
        sorted_ids[rows++] = order[i];
    }
    for (int32_t p = rows; p < max_rows; p++) sorted_ids[p] = INT32_MIN; /* never read */

    epmoe_permute_args_t args = make_permute(num_tokens, top_k, hidden, dtype, max_rows);
    args.x = x, args.sorted_ids = sorted_ids, args.num_rows = &rows, args.y = y, args.inverse = inverse;
    run_permute(&args);
    for (int32_t s = 0; s < num_slots; s++) cr_assert_eq(inverse[s], place[s]);
    for (int32_t p = 0; p < rows; p++)
        for (int64_t b = 0; b < row_bytes; b++) {
            unsigned char expected = sorted_ids[p] == num_slots ? 0 : x[sorted_ids[p] / top_k * row_bytes + b];
            cr_assert_eq(y[p * row_bytes + b], expected, "row %d, byte %lld", p, (long long)b);
        }
    cr_assert(testing_is_poison(y, rows * row_bytes, (max_rows - rows) * row_bytes));
    cr_assert(testing_guards_intact(x) && testing_guards_intact(y) && testing_guards_intact(inverse));
    args.inverse = NULL;
    run_permute(&args);

    if (epmoei_dtype_is_float(dtype)) {
        int64_t n = (int64_t)num_tokens * hidden;
        float *weights = malloc(4 * (size_t)num_slots);
        void *out = testing_buffer(n * size, size);
        double *expected = calloc((size_t)n, sizeof *expected), *size_of_terms = calloc((size_t)n, sizeof(double));
        testing_fill_normal(rng, y, dtype, (int64_t)max_rows * hidden, 1);
        for (int32_t s = 0; s < num_slots; s++) weights[s] = testing_uniform(rng, 0, 1);
        for (int32_t p = 0; p < rows; p++) /* by rows of y: another way round than the op's */
            for (int32_t i = 0; i < hidden && sorted_ids[p] < num_slots; i++) {
                int64_t at = (int64_t)(sorted_ids[p] / top_k) * hidden + i;
                double term = (double)weights[sorted_ids[p]] * (double)epmoei_load(y, dtype, (int64_t)p * hidden + i);
                expected[at] += term;
                size_of_terms[at] += fabs(term);
            }
        epmoe_unpermute_args_t un = make_unpermute(num_tokens, top_k, hidden, dtype, max_rows);
        un.y = y, un.inverse = inverse, un.weights = weights, un.out = out;
        run_unpermute(&un);
        double half_ulp = 0;
        for (int d = 0; d < OP_NUM_DTYPES; d++)
            if (op_dtypes[d].dtype == dtype) half_ulp = op_dtypes[d].half_ulp;
        /* Terms may cancel: the fp32 sum is off by a part of their size, not of the result. */
        for (int64_t i = 0; i < n; i++) {
            double bound = half_ulp * 1.001 * fabs(expected[i]) + size_of_terms[i] * top_k * 0x1p-23 + 1e-7;
            double error = fabs((double)epmoei_load(out, dtype, i) - expected[i]);
            cr_assert(error <= bound, "element %lld: error %g, bound %g", (long long)i, error, bound);
        }
        cr_assert(testing_guards_intact(out));
        testing_buffer_free(out);
        free(weights), free(expected), free(size_of_terms);
    }
    testing_buffer_free(x), testing_buffer_free(y), testing_buffer_free(sorted_ids), testing_buffer_free(inverse);
    free(order), free(place);
}

Test(permute, random_shapes_there_and_back)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16, EPMOE_F8_E4M3, EPMOE_U8, EPMOE_I32};
    const int32_t tokens[] = {1, 3, 63, 127}, widths[] = {1, 3, 96, 769, 1024, 1025, 2880};
    for (int t = 0; t < 4; t++)
        for (int d = 0; d < 6; d++)
            for (int w = 0; w < 7; w++) {
                int32_t top_k = testing_range(&rng, 1, tokens[t] > 3 && widths[w] > 100 ? 2 : 8);
                if (tokens[t] > 3 && widths[w] > 1000 && (t + d + w) % 3) continue;
                round_trip(&rng, dtypes[d], tokens[t], top_k, widths[w]);
            }
}

Test(permute, slots_ascend_and_round_once)
{
    const float y[] = {1, -1e8f, 1e8f};
    const int32_t inverse[] = {2, 0, 1};
    float out[1];
    epmoe_unpermute_args_t args = make_unpermute(1, 3, 1, EPMOE_F32, 3);
    args.y = y, args.inverse = inverse, args.out = out;
    run_unpermute(&args);
    cr_assert_eq(out[0], 0, "(1e8 + 1) - 1e8 is 0 in fp32");
    const int32_t other[] = {2, 1, 0};
    args.inverse = other;
    run_unpermute(&args);
    cr_assert_eq(out[0], 1);

    char rows[4 * 3], rounded[4];
    for (int32_t i = 0; i < 3; i++) epmoei_store(rows, EPMOE_BF16, i, i ? 0x1p-8f : 1.0f);
    const int32_t straight[] = {0, 1, 2};
    args.dtype = EPMOE_BF16, args.y = rows, args.inverse = straight, args.out = rounded;
    run_unpermute(&args);
    cr_assert_eq(epmoei_load(rounded, EPMOE_BF16, 0), 1 + 0x1p-7f);
}

Test(permute, no_tokens)
{
    epmoe_permute_args_t args = make_permute(0, 2, 8, EPMOE_BF16, 0);
    cr_assert_eq(epmoe_permute(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    args.max_rows = 16;
    cr_assert_eq(epmoe_permute(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    epmoe_unpermute_args_t un = make_unpermute(0, 2, 8, EPMOE_BF16, 0);
    cr_assert_eq(epmoe_unpermute(&un, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(permute, errors_name_the_argument_and_leave_the_outputs)
{
    const float x[8] = {0};
    const int32_t sorted_ids[] = {0, 1, 2, 3}, rows = 4;
    float *y = testing_buffer(32, 0);
    int32_t *inverse = testing_buffer(16, 0);
    epmoe_permute_args_t base = make_permute(2, 2, 2, EPMOE_F32, 4);
    base.x = x, base.sorted_ids = sorted_ids, base.num_rows = &rows, base.y = y, base.inverse = inverse;
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_permute, base, needle, testing_is_poison(y, 0, 32) && testing_is_poison(inverse, 0, 16), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("top_k is 0", bad.top_k = 0);
    REJECTS("hidden is 0", bad.hidden = 0);
    REJECTS("max_rows is -1", bad.max_rows = -1);
    REJECTS("slots", bad.num_tokens = bad.top_k = 65536);
    REJECTS("overflows", bad.max_rows = bad.hidden = INT32_MAX);
    REJECTS("dtype", bad.dtype = EPMOE_I64);
    REJECTS("dtype", bad.dtype = EPMOE_DTYPE_NONE);
    REJECTS("x is NULL", bad.x = NULL);
    REJECTS("sorted_ids is NULL", bad.sorted_ids = NULL);
    REJECTS("num_rows is NULL", bad.num_rows = NULL);
    REJECTS("y is NULL", bad.y = NULL);
    REJECTS("backend is 5", bad.backend = (epmoe_backend_t)5);
    const int32_t negative[] = {0, 1, 2, -1};
    int32_t count = 5;
    REJECTS("sorted_ids[3] is -1", bad.sorted_ids = negative);
    REJECTS("num_rows is 5", bad.num_rows = &count);
    count = -1;
    REJECTS("num_rows is -1", bad.num_rows = &count);
#undef REJECTS
    testing_buffer_free(y), testing_buffer_free(inverse);
}

Test(permute, errors_of_the_way_back)
{
    const float y[8] = {0};
    const int32_t inverse[] = {0, 1, 2, 3};
    float *out = testing_buffer(16, 0);
    epmoe_unpermute_args_t base = make_unpermute(2, 2, 2, EPMOE_F32, 4);
    base.y = y, base.inverse = inverse, base.out = out;
#define REJECTS(needle, statement) OP_INVALID(epmoe_unpermute, base, needle, testing_is_poison(out, 0, 16), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("top_k is 0", bad.top_k = 0);
    REJECTS("hidden is 0", bad.hidden = 0);
    REJECTS("max_rows is -1", bad.max_rows = -1);
    REJECTS("slots", bad.num_tokens = bad.top_k = 65536);
    REJECTS("dtype", bad.dtype = EPMOE_U8);
    REJECTS("y is NULL", bad.y = NULL);
    REJECTS("inverse is NULL", bad.inverse = NULL);
    REJECTS("out is NULL", bad.out = NULL);
    REJECTS("inverse[3] is 3", bad.max_rows = 3);
    const int32_t low[] = {0, -1, -2, 3};
    REJECTS("inverse[2] is -2", bad.inverse = low);
    REJECTS("backend is 5", bad.backend = (epmoe_backend_t)5);
#undef REJECTS
    testing_buffer_free(out);
}

Test(permute, struct_sizes)
{
    const float x[] = {7};
    const int32_t sorted_ids[] = {0}, rows = 1;
    float *y = testing_buffer(4, 0), *out = testing_buffer(4, 0);
    epmoe_permute_args_t base = make_permute(1, 1, 1, EPMOE_F32, 1);
    base.x = x, base.sorted_ids = sorted_ids, base.num_rows = &rows, base.y = y;
    OP_STRUCT_SIZES(epmoe_permute, base, offsetof(epmoe_permute_args_t, inverse), testing_is_poison(y, 0, 4),
                    y[0] == 7);
    epmoe_unpermute_args_t un = make_unpermute(1, 1, 1, EPMOE_F32, 1);
    un.y = x, un.inverse = sorted_ids, un.out = out;
    OP_STRUCT_SIZES(epmoe_unpermute, un, sizeof un, testing_is_poison(out, 0, 4), out[0] == 7);
    testing_buffer_free(y), testing_buffer_free(out);
}

Test(permute, floor_counts_each_byte_once)
{
    epmoe_permute_args_t args = make_permute(3, 2, 8, EPMOE_BF16, 10);
    cr_assert_eq(epmoei_permute_floor(&args).bytes, (3 + 10) * 16 + 8 * 10);
    epmoe_unpermute_args_t un = make_unpermute(3, 2, 8, EPMOE_BF16, 10);
    cr_assert_eq(epmoei_unpermute_floor(&un).bytes, (6 + 3) * 16 + 8 * 6);
    cr_assert_eq(epmoei_unpermute_floor(&un).flops, 2 * 6 * 8);
}
