/* Small collectives on numbers, over epmoe_comm_all_gather. */
#ifndef EPMOE_BENCH_AGREE_H
#define EPMOE_BENCH_AGREE_H

#include "tools/program.h"

/* values [count] become the largest of all ranks; a NaN wins. */
epmoe_status_t bench_max(epmoe_comm_t *comm, double *values, int64_t count);
/* values [count] become the sum over the ranks. */
epmoe_status_t bench_sum(epmoe_comm_t *comm, int64_t *values, int64_t count);

/* Collective: reports a failure that every rank has some share in, each text once and by the first rank that has it.
 * What ranks only heard of from others is not repeated. Returns the exit code of this rank's status. */
int bench_report(const program_t *program, epmoe_status_t status);

#endif
