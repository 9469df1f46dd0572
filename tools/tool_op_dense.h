/* The dense ops' rows of the table of `moe_tool op`. */
#ifndef EPMOE_TOOLS_TOOL_OP_DENSE_H
#define EPMOE_TOOLS_TOOL_OP_DENSE_H

#include "tools/tool_op.h"

#define OP_CACHE_LAYOUTS "v1,nhd,hnd"                 /* = epmoe_cache_layout_t */
#define OP_QUANTS        "none,tensor,token,block128" /* 0, and epmoe_granularity_t */

/* What ops with a quantised output [rows,cols] share: tensor `scale` is in with quant=tensor, and out always. */
epmoe_status_t op_static_scale(const op_context_t *context, epmoe_granularity_t quant, const float **out);
epmoe_status_t op_output_scale(op_context_t *context, epmoe_granularity_t quant, int64_t rows, int64_t cols,
                               float **out);

extern const op_tensor_t op_rms_norm_tensors[], op_rope_tensors[], op_qk_norm_rope_tensors[], op_cache_write_tensors[];
extern const op_key_t op_rms_norm_keys[], op_rope_keys[], op_qk_norm_rope_keys[], op_cache_write_keys[];
epmoe_status_t op_rms_norm_run(op_context_t *context);
epmoe_status_t op_rope_run(op_context_t *context);
epmoe_status_t op_qk_norm_rope_run(op_context_t *context);
epmoe_status_t op_cache_write_run(op_context_t *context);

/* The sizes of a cache tensor are those of `shape`, in which a negative one is learnt; INVALID_ARGUMENT says what was
 * `expected`. */
epmoe_status_t op_match_cache(const char *name, const op_value_t *tensor, int32_t num_dims, int64_t *const *shape,
                              const char *expected);

/* tool_op_attention.c */
extern const op_tensor_t op_attention_tensors[], op_sample_tensors[], op_spec_verify_tensors[];
extern const op_key_t op_attention_keys[], op_sample_keys[], op_spec_verify_keys[];
epmoe_status_t op_attention_run(op_context_t *context);
epmoe_status_t op_sample_run(op_context_t *context);
epmoe_status_t op_spec_verify_run(op_context_t *context);

#endif
