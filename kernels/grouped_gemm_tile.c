#include "kernels/grouped_gemm_tile.h"
#include <math.h>
#include <stdlib.h>

int32_t epmoei_grouped_gemm_tile_sm80(int32_t num_experts, int64_t max_rows)
{
    int64_t mean = epmoei_ceil_div(max_rows, num_experts);
    if (mean <= 16) return 16;
    if (mean <= 32) return 32;
    if (mean <= 64) return 64;
    return 128;
}

int32_t epmoei_grouped_gemm_width_sm90(int32_t num_experts, int64_t max_rows)
{
    int64_t mean = epmoei_ceil_div(max_rows, num_experts);
    if (getenv("EPX_ADAPT")) { double m = (double)mean + 3.0 * sqrt((double)mean); int w = (int)(m + 15.99) / 16 * 16; return w < 64 ? 64 : w > 256 ? 256 : w; }
    if (mean <= 36) return 64;
    if (mean <= 88) return 128;
    return 256;
}
