/* From the file and the command line to what an op asks for, and back: tool_op.c drives, tool_op_read.c checks and
 * converts, tool_op_memory.c holds the memory of the backend. */
#ifndef EPMOE_TOOLS_TOOL_OP_READ_H
#define EPMOE_TOOLS_TOOL_OP_READ_H

#include "tools/safetensors_write.h"
#include "tools/tool_op.h"

#define OP_MAX_TENSORS 48
#define OP_MAX_KEYS    16
#define OP_MAX_SCRATCH 4

struct op_context {
    const op_t *op;
    epmoe_backend_t backend;
    double keys[OP_MAX_KEYS]; /* by place in op->keys; every whole number here fits a double */
    bool given[OP_MAX_KEYS];  /* from the command line, or by an initial value */
    op_value_t tensors[OP_MAX_TENSORS];
    int64_t dims[128];                            /* by letter, -1 = not known yet */
    safetensors_output_t outputs[OP_MAX_TENSORS]; /* data NULL until op_finish */
    void *output_data[OP_MAX_TENSORS];            /* the backend's */
    void *output_host[OP_MAX_TENSORS];
    int32_t num_outputs;
    void *scratch[OP_MAX_SCRATCH]; /* the backend's */
    int32_t num_scratch;
    void *host_scratch;
};

void op_context_init(op_context_t *context, const op_t *op, epmoe_backend_t backend);
void op_context_free(op_context_t *context);
/* Sets value->data to a copy of value->host in the backend's memory. `what` is for the message. */
epmoe_status_t op_place(op_context_t *context, op_value_t *value, int64_t num_elements, const char *what);
/* After the op was enqueued: waits for it, reports what its kernels found wrong, and brings the outputs to the host. */
epmoe_status_t op_finish(op_context_t *context);
/* Index in op->keys or op->tensors, -1 when it is not there. */
int32_t op_find_key(const op_t *op, const char *name, size_t length);
int32_t op_find_tensor(const op_t *op, const char *name);
/* One "key=value". INVALID_ARGUMENT lists the right keys or values. */
epmoe_status_t op_set_key(op_context_t *context, const char *setting);
/* After the last one: initial values, and an error for a required key that is not there. */
epmoe_status_t op_finish_keys(op_context_t *context);
/* Checks and copies every tensor of the file. */
epmoe_status_t op_read_tensors(op_context_t *context, const epmoei_safetensors_t *file);

#endif
