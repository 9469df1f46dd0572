/* Rotary position embedding and the cache write of the rotated keys and the values, in one pass; the maths stand at
 * epmoe_rope_args_t and epmoe_cache_write_args_t.
 *
 * Contract of every kernel: those of dense_layers/rope.h and then dense_layers/cache_write.h with the rotated k as key,
 * bit for bit, q and k in place included. A token whose position is outside the table (CUDA) is cached unrotated.
 */
#ifndef EPMOEI_ROPE_CACHE_WRITE_H
#define EPMOEI_ROPE_CACHE_WRITE_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises both: after it `cache` has the key and stride of `rope`. */
epmoe_status_t epmoei_rope_cache_write_check(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                             epmoe_rope_args_t *rope_out, epmoe_cache_write_args_t *cache_out);

/* The least work: the rotated columns in and out, every key and value into the cache, whose columns that do not turn
 * and whose values are read besides. */
epmoei_floor_t epmoei_rope_cache_write_floor(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache);

epmoe_status_t epmoei_rope_cache_write_ref(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                           epmoe_stream_t stream);
epmoe_status_t epmoei_rope_cache_write_cpu(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                           epmoe_stream_t stream);
epmoe_status_t epmoei_rope_cache_write_sm80(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                            epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
