/* New keys and values into a paged cache; layouts and maths stand at epmoe_cache_layout_t and epmoe_cache_write_args_t.
 *
 * Contract of every kernel:
 *   order       none: each element is copied, or divided by its scale in fp32 and encoded once
 *   edges       slot -1 is skipped and its rows are not read; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the bases, slots as their dtype, scales 4 bytes. Heads and strides of
 *               whole 16 bytes of `dtype`, and packs of V1 that hold as many elements, are the fast way
 *   aliasing    none
 *   padding     other slots, and what a block stride leaves between blocks, are untouched
 *   slots       outside [-1, B*S): an error on the CPU, nothing is written; on CUDA counted and skipped. The same slot
 *               twice: on the CPU the later token wins, on CUDA either, element by element
 *   NaN         a copy keeps its bits; E4M3 stores 0x7F
 */
#ifndef EPMOEI_CACHE_WRITE_H
#define EPMOEI_CACHE_WRITE_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_cache_write_check(const epmoe_cache_write_args_t *args, epmoe_cache_write_args_t *out);
/* What only host memory lets one check: slots and scales. */
epmoe_status_t epmoei_cache_write_check_values(const epmoe_cache_write_args_t *args);

/* The least work when no slot is -1: every row once in and out, the slots. */
epmoei_floor_t epmoei_cache_write_floor(const epmoe_cache_write_args_t *args);

epmoe_status_t epmoei_cache_write_ref(const epmoe_cache_write_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_cache_write_cpu(const epmoe_cache_write_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_cache_write_sm80(const epmoe_cache_write_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
