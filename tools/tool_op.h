/* The ops that `moe_tool op` knows, as a table: what each takes from the file and the command line, and what runs it.
 */
#ifndef EPMOE_TOOLS_TOOL_OP_H
#define EPMOE_TOOLS_TOOL_OP_H

#include "moe/safetensors.h"

/* How a tensor of the file is handed to the op, always copied to aligned memory of the backend. */
typedef enum op_kind_t {
    OP_FLOAT,  /* F32, BF16 or F16, as it is */
    OP_AS_F32, /* F32, BF16 or F16, converted to F32 */
    OP_F32,    /* F32 only */
    OP_INDEX,  /* I32, or I64 within the range of I32; as I32 */
    OP_WIDE,   /* I32 or I64, as it is */
    OP_CACHE,  /* F32, BF16, F16 or F8_E4M3, as it is */
} op_kind_t;

/* A shape is a list of dimensions: a letter stands for a size that is the same wherever it occurs, "2f" for twice that,
 * "1" for one.
 * The table's order is the order in which the letters are learnt. */
typedef struct op_tensor_t {
    const char *name;  /* NULL ends a list */
    const char *alias; /* another name for the same tensor, or NULL */
    const char *shape;
    op_kind_t kind;
    bool optional;
    bool any_shape; /* `shape` is for the help alone: the op looks at the sizes itself */
} op_tensor_t;

typedef enum op_key_kind_t {
    OP_COUNT,    /* whole number >= 1 */
    OP_GROUP,    /* whole number >= 1, or -1 */
    OP_REAL,     /* finite and not 0: 0 means "default" to the library */
    OP_POSITIVE, /* finite and above 0 */
    OP_CHOICE,   /* one of `choices`; its value is the index */
} op_key_kind_t;

typedef struct op_key_t {
    const char *name; /* NULL ends a list */
    op_key_kind_t kind;
    const char *choices;
    const char *initial; /* the value when it is not given; NULL = the library's default */
    bool required;
    char dim; /* the letter that this number is in the shapes, or 0 */
} op_key_t;

typedef struct op_context op_context_t;

typedef struct op_t {
    const char *name;
    const char *outputs;                                  /* for the help */
    epmoe_status_t (*run)(op_context_t *context);         /* NULL: known, not built */
    epmoe_status_t (*check)(const op_context_t *context); /* of the keys, before the file is read, or NULL */
    const op_tensor_t *tensors;
    const op_key_t *keys;
} op_t;

extern const op_t tool_ops[]; /* ends with name NULL */

/* What a run function asks for. A tensor that is not there has data NULL and dtype NONE. */
typedef struct op_value_t {
    bool present;
    epmoe_dtype_t dtype;
    void *data; /* in the backend's memory */
    void *host; /* the same in host memory */
    int32_t num_dims;
    int64_t shape[EPMOEI_MAX_DIMS];
} op_value_t;
const op_value_t *op_tensor(const op_context_t *context, const char *name);
int32_t op_dim(const op_context_t *context, char letter);
bool op_has(const op_context_t *context, const char *key);
/* Values of keys; 0 for a key that was not given and has no initial value. */
int32_t op_number(const op_context_t *context, const char *key);
float op_real(const op_context_t *context, const char *key);
epmoe_backend_t op_backend(const op_context_t *context);

/* A tensor of the output file in the backend's memory, poisoned: floats are NaN, so that what the op leaves out cannot
 * pass for a result. NULL when there is no memory. */
void *op_output(op_context_t *context, const char *name, epmoe_dtype_t dtype, int32_t num_dims, const int64_t *shape);
#define OP_SHAPE(...)                                                                                                  \
    (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) { __VA_ARGS__ }
/* The same, beginning as a copy of an input: for ops that work in place. */
void *op_output_copy(op_context_t *context, const char *name, const op_value_t *value);
/* Scratch of the backend's memory that lives as long as the context; NULL when there is no memory. */
void *op_scratch(op_context_t *context, int64_t bytes);
/* The same of host memory, once per op. */
void *op_host_scratch(op_context_t *context, int64_t bytes);

#endif
