/* What the bench calls wrong, and its medians. */
#include "bench/stats.c"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>

Test(bench_stats, wrong_is_relative_to_the_value_plus_the_rms)
{
    /* rms 5: tolerances are 0.01 * (7 + 5) and 0.01 * (1 + 5). */
    const double ref[2] = {7, 1}, good[2] = {7.119, 0.941}, first[2] = {7.121, 1}, second[2] = {7, 0.939};
    double worst = 0;
    cr_assert_eq(stats_count_wrong(good, ref, 2, 0.01, &worst), 0);
    cr_assert_float_eq(worst, 0.119 / 12, 1e-12);
    cr_assert_eq(stats_count_wrong(first, ref, 2, 0.01, &worst), 1);
    cr_assert_eq(stats_count_wrong(second, ref, 2, 0.01, NULL), 1);
    cr_assert_float_eq(worst, 0.121 / 12, 1e-12);
}

Test(bench_stats, nan_and_infinity_are_wrong)
{
    const double ref[3] = {1, 2, 3}, bad[3] = {NAN, INFINITY, 3}, spoilt[3] = {NAN, 2, 3};
    double worst = 0;
    cr_assert_eq(stats_count_wrong(bad, ref, 3, 0.5, &worst), 2);
    cr_assert(isinf(worst));
    /* A reference that is itself NaN makes nothing right, equal or not. */
    cr_assert_geq(stats_count_wrong(spoilt, spoilt, 3, 0.5, NULL), 1);
    cr_assert_geq(stats_count_wrong(ref, spoilt, 3, 0.5, NULL), 1);
}

Test(bench_stats, a_row_of_zeros_must_be_met_exactly)
{
    const double zero[2] = {0, 0}, tiny[2] = {0, 1e-30};
    cr_assert_eq(stats_count_wrong(zero, zero, 2, 0.01, NULL), 0);
    cr_assert_eq(stats_count_wrong(tiny, zero, 2, 0.01, NULL), 1);
}

Test(bench_stats, many_rows_are_far_by_their_norm)
{
    const double ref[2][2] = {{3, 0}, {0, 4}}, out[2][2] = {{3.3, 0}, {0, 4.4}}, spoilt[2] = {NAN, 4};
    stats_squares_t squares = {0};
    for (int i = 0; i < 2; i++) stats_add_row(&squares, out[i], ref[i], 2);
    cr_assert_float_eq(squares.error, 0.25, 1e-12);
    cr_assert_float_eq(squares.ref, 25, 1e-12);
    cr_assert(!stats_is_far(&squares, 0.1001));
    cr_assert(stats_is_far(&squares, 0.0999));
    stats_add_row(&squares, spoilt, ref[1], 2);
    cr_assert(stats_is_far(&squares, 1e9));
}

Test(bench_stats, median)
{
    double odd[] = {5, 1, 9}, even[] = {4, 10, 1, 2}, one[] = {3};
    cr_assert_eq(stats_median(odd, 3), 5);
    cr_assert_eq(stats_median(even, 4), 3);
    cr_assert_eq(stats_median(one, 1), 3);
    cr_assert_eq(even[0], 1);
    cr_assert_eq(even[3], 10);
}

Test(bench_stats, stages_follow_one_another_in_the_order_of_their_ends)
{
    double ends[EPMOE_STAGE_COUNT], times[EPMOE_STAGE_COUNT];
    for (int32_t s = 0; s < EPMOE_STAGE_COUNT; s++) ends[s] = -1;
    stats_stages(ends, times);
    for (int32_t s = 0; s < EPMOE_STAGE_COUNT; s++) cr_assert_eq(times[s], 0);

    /* The shared expert, the last of the list, runs second; align ends with it; act and dispatch do not run. */
    ends[EPMOE_STAGE_ROUTER] = 5;
    ends[EPMOE_STAGE_SHARED] = 9;
    ends[EPMOE_STAGE_ALIGN] = 9;
    ends[EPMOE_STAGE_GEMM1] = 30;
    ends[EPMOE_STAGE_GEMM2] = 42.5;
    ends[EPMOE_STAGE_COMBINE] = 44;
    ends[EPMOE_STAGE_DISPATCH] = -7;
    stats_stages(ends, times);
    cr_assert_eq(times[EPMOE_STAGE_ROUTER], 5);
    cr_assert_eq(times[EPMOE_STAGE_ALIGN] + times[EPMOE_STAGE_SHARED], 4);
    cr_assert_eq(times[EPMOE_STAGE_GEMM1], 21);
    cr_assert_eq(times[EPMOE_STAGE_GEMM2], 12.5);
    cr_assert_eq(times[EPMOE_STAGE_COMBINE], 1.5);
    cr_assert_eq(times[EPMOE_STAGE_ACT] + times[EPMOE_STAGE_DISPATCH], 0);
}

Test(bench_stats, transports_are_held_against_nccl_or_the_slowest)
{
    const epmoe_transport_t all[] = {EPMOE_TRANSPORT_P2P, EPMOE_TRANSPORT_NCCL, EPMOE_TRANSPORT_MPI};
    const epmoe_transport_t two[] = {EPMOE_TRANSPORT_P2P, EPMOE_TRANSPORT_MPI};
    cr_assert_eq(stats_base(all, (const double[]){3, 5, 9}, 3), 1);
    cr_assert_eq(stats_base(all, (const double[]){5, 3, 9}, 3), 1);
    cr_assert_eq(stats_base(two, (const double[]){3, 9}, 2), 1);
    cr_assert_eq(stats_base(two, (const double[]){9, 3}, 2), 0);
    cr_assert_eq(stats_base(&two[1], (const double[]){4}, 1), 0);
}
