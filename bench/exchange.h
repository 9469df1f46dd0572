/* --op exchange: dispatch and combine alone, on all ranks, over the transport asked for and beside it over the others
 * that these ranks can use. */
#ifndef EPMOE_BENCH_EXCHANGE_H
#define EPMOE_BENCH_EXCHANGE_H

#include "bench/bench.h"

/* Times every case over every transport; `wrong` counts the bytes of y that differ between transports. */
epmoe_status_t exchange_run(const bench_t *bench, int64_t *wrong);

#endif
