/* Which kernel runs a dense op on a backend, as kernels/kernel_table.h does for the ops of the experts: a table
 * for the reference, one for the CPU, one for CUDA, each whole. A NULL entry means NOT_SUPPORTED on that backend. */
#ifndef EPMOEI_DENSE_TABLE_H
#define EPMOEI_DENSE_TABLE_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels get arguments that the op's public entry has checked and normalised, T > 0, every needed pointer there. */
typedef struct epmoei_dense_table_t {
    epmoe_status_t (*rms_norm)(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*linear)(const epmoe_linear_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*rope)(const epmoe_rope_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*qk_norm_rope)(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*cache_write)(const epmoe_cache_write_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*rope_cache_write)(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                       epmoe_stream_t stream);
    epmoe_status_t (*attention)(const epmoe_attention_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*sample)(const epmoe_sample_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*spec_verify)(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream);
} epmoei_dense_table_t;

/* `backend` as the caller gave it; NOT_SUPPORTED (with the reason) when it cannot run here. */
epmoe_status_t epmoei_dense_kernels(epmoe_backend_t backend, const epmoei_dense_table_t **table);

#ifdef __cplusplus
}
#endif

#endif
