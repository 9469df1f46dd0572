#include "kernels/grouped_gemm_tile.h"

#include <math.h>

int32_t epmoei_grouped_gemm_tile_sm80(int32_t num_experts, int64_t max_rows)
{
    int64_t mean = epmoei_ceil_div(max_rows, num_experts);
    if (mean <= 16) return 16;
    if (mean <= 24) return 32;
    return 256;
}

int32_t epmoei_grouped_gemm_rows_sm80(int32_t num_experts, int64_t max_rows, int32_t n, int32_t num_sms)
{
    enum { kLeast = 64, kMost = 256, kColumns = 128 };
    const int64_t mean = epmoei_ceil_div(max_rows, num_experts);
    const int64_t columns = num_experts * epmoei_ceil_div(n, kColumns);
    int32_t rows = kMost;
    while (rows > kLeast && epmoei_ceil_div(mean, rows) * columns < num_sms) rows /= 2;
    return rows;
}

int32_t epmoei_grouped_gemm_tile_quant_sm80(int32_t num_experts, int64_t max_rows)
{
    int64_t mean = epmoei_ceil_div(max_rows, num_experts);
    return mean <= 16 ? 16 : mean <= 32 ? 32 : 64;
}

int32_t epmoei_grouped_gemm_width_sm90(int32_t num_experts, int64_t max_rows, int32_t n, int32_t k)
{
    enum { kLeast = 64, kMost = 256, kStep = 64 };
    const int64_t small_expert = (int64_t)4 << 20;
    const double mean = (double)max_rows / num_experts;
    double most = (int64_t)n * k < small_expert ? mean + 3.0 * sqrt(mean) : 3.0 * mean;
    if (most > (double)max_rows) most = (double)max_rows;
    if (most >= kMost) return kMost;
    return (int32_t)epmoei_max64(kLeast, epmoei_round_up((int64_t)ceil(most), kStep));
}

bool epmoei_grouped_gemm_deals_sm90(int32_t num_experts, int64_t max_rows, int32_t k)
{
    enum { kLeastRows = 8 * 256, kLeastColumns = 4096 };
    return max_rows / num_experts >= kLeastRows && k >= kLeastColumns;
}

int32_t epmoei_grouped_gemm_width_w4_sm90(int32_t num_experts, int64_t max_rows)
{
    enum { kLeast = 16, kMost = 256, kStep = 16 };
    double mean = (double)max_rows / num_experts;
    double most = mean + 3.0 * sqrt(mean);
    if (most >= kMost) return kMost;
    return (int32_t)epmoei_max64(kLeast, epmoei_round_up((int64_t)most, kStep));
}
