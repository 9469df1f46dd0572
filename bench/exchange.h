/* --op exchange: dispatch and combine alone, on all ranks, over the transport asked for and beside it over the others
 * that these ranks can use. */
#ifndef EPMOE_BENCH_EXCHANGE_H
#define EPMOE_BENCH_EXCHANGE_H

#include "bench/bench.h"

/* Times every case over every transport, and holds the times against those of nccl or the slowest; `wrong` counts the
 * elements of y that did not come back right over the first, and the bytes in which the others differ from it. */
epmoe_status_t exchange_run(const bench_t *bench, int64_t *wrong);

#endif
