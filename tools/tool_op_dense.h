/* The dense ops' rows of the table of `moe_tool op`. */
#ifndef EPMOE_TOOLS_TOOL_OP_DENSE_H
#define EPMOE_TOOLS_TOOL_OP_DENSE_H

#include "tools/tool_op.h"

extern const op_tensor_t op_rms_norm_tensors[], op_rope_tensors[], op_qk_norm_rope_tensors[], op_cache_write_tensors[];
extern const op_key_t op_rms_norm_keys[], op_rope_keys[], op_qk_norm_rope_keys[], op_cache_write_keys[];
epmoe_status_t op_rms_norm_run(op_context_t *context);
epmoe_status_t op_rope_run(op_context_t *context);
epmoe_status_t op_qk_norm_rope_run(op_context_t *context);
epmoe_status_t op_cache_write_run(op_context_t *context);

#endif
