/* The kernels of attention by number, so that a test can run all of them. */
#ifndef EPMOE_ATTENTION_TESTING_H
#define EPMOE_ATTENTION_TESTING_H

#include "dense_layers/attention.h"
#include "dense_layers/attention_tile.h"
#include "tests/op_testing.h"

/* The instruction sets of this machine: `lower` steps below the best. */
static inline epmoe_status_t run_isa(const epmoe_attention_args_t *args, int lower)
{
    int tier = (int)epmoei_cpu_tier() - lower;
    if (tier < EPMOEI_CPU_GENERIC) tier = EPMOEI_CPU_GENERIC;
    return epmoei_attention_cpu_isa(args, epmoei_attention_isa((epmoei_cpu_tier_t)tier));
}

/* The public entry, the reference, the instruction sets. */
static inline epmoe_status_t run_kernel(const epmoe_attention_args_t *args, int kernel)
{
    if (kernel == 0) return epmoe_attention(args, NULL);
    return kernel == 1 ? epmoei_attention_ref(args, NULL) : run_isa(args, kernel - 2);
}
enum { NUM_KERNELS = 5 };

#endif
