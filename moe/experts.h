/* The routed experts as one call; the maths stand at epmoe_experts_args_t. */
#ifndef EPMOEI_EXPERTS_H
#define EPMOEI_EXPERTS_H

#include "kernels/coded_rows.h"
#include "moe/stages.h"

/* Where the slots' order lies in the workspace of a call, as an align with block_size 1 leaves it. */
typedef struct epmoei_experts_order_t {
    int32_t *sorted_ids;      /* [T*k] */
    int32_t *num_post_padded; /* [1] */
    int32_t *expert_offsets;  /* [E+1] */
    int32_t *places;          /* [T*k]: where each slot stands; NULL = not wanted */
} epmoei_experts_order_t;
/* CUDA only: on the CPU one call sorts chunk by chunk. */
epmoe_status_t epmoei_experts_order(const epmoe_experts_args_t *args, epmoei_experts_order_t *order);

/* epmoe_experts with arguments that are already checked. `aligned`: the order of all slots is there already (CUDA).
 * Ends a stage of `stages` (may be NULL) after each. */
epmoe_status_t epmoei_experts_run(const epmoe_experts_args_t *args, bool aligned, epmoe_stream_t stream,
                                  epmoei_stages_t *stages);
/* Whether x may come as codes instead, whose first product would quantise it anyhow; pointers are not read. The codes
 * of what they stand for are these codes, unless they stand for blocks of nothing but |x| < 2.7e-33. */
bool epmoei_experts_take_codes(const epmoe_experts_args_t *args);
/* With them in place of args->x. */
epmoe_status_t epmoei_experts_run_codes(const epmoe_experts_args_t *args, const epmoei_coded_rows_t *x,
                                        epmoe_stream_t stream, epmoei_stages_t *stages);
/* Sizes, enums and formats only; defaults filled. */
epmoe_status_t epmoei_experts_check_shape(const epmoe_experts_args_t *args, epmoe_experts_args_t *out);

#endif
