/* --op: ops of the library alone on one rank, at a model's shape. */
#ifndef EPMOE_BENCH_OP_H
#define EPMOE_BENCH_OP_H

#include "bench/bench.h"

/* Times every case and compares it with the op's reference kernel; `wrong` is the number of values that differ. */
epmoe_status_t op_run(const bench_t *bench, int64_t *wrong);

#endif
