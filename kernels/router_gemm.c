#include "kernels/router_gemm.h"

/* Parts near 1024 (512 for a narrow model) are short enough to spread the weights of a few experts over a device and
 * long enough that adding them costs little. */
epmoei_router_parts_t epmoei_router_parts(int32_t hidden, int32_t num_experts)
{
    enum { kNarrow = 2048, kChainsPerPart = 4 };
    epmoei_router_parts_t parts;
    parts.chain = hidden <= kNarrow ? 128 : 256;
    int32_t least = (int32_t)epmoei_ceil_div(hidden, EPMOEI_ROUTER_MAX_PARTS);
    parts.part = (int32_t)epmoei_round_up(epmoei_max64(least, 1), kChainsPerPart * parts.chain);
    parts.num_parts = (int32_t)epmoei_ceil_div(hidden, parts.part);
    parts.row_stride = (int32_t)epmoei_round_up(num_experts, 16);
    return parts;
}
