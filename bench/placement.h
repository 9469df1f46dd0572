/* --placement balanced: experts with copies, planned for the load that the forced routing of all cases asks for. */
#ifndef EPMOE_BENCH_PLACEMENT_H
#define EPMOE_BENCH_PLACEMENT_H

#include "bench/bench.h"

/* Collective. Gives the layer's config its placement; nothing to do for contiguous. */
epmoe_status_t placement_configure(bench_t *bench);
void placement_free(bench_t *bench);

/* Physical experts; the experts themselves when contiguous. */
static inline int32_t placement_num_physical(const bench_t *bench)
{
    return bench->placement ? bench->config.num_physical : bench->config.num_experts;
}

/* The physical expert of every slot of this rank; free it with epmoei_free. */
epmoe_status_t placement_ids(const bench_case_t *made, const bench_t *bench, int32_t **ids);

#endif
