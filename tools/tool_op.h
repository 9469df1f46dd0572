/* The ops that `moe_tool op` knows, as a table: what each takes from the file and the command line, and what runs it.
 */
#ifndef EPMOE_TOOLS_TOOL_OP_H
#define EPMOE_TOOLS_TOOL_OP_H

#include "moe/safetensors.h"

/* How a tensor of the file is handed to the op, always copied to aligned memory of the backend. */
typedef enum op_kind_t {
    OP_FLOAT,   /* F32, BF16 or F16, as it is */
    OP_AS_F32,  /* F32, BF16 or F16, converted to F32 */
    OP_F32,     /* F32 only */
    OP_INDEX,   /* I32, or I64 within the range of I32; as I32 */
    OP_WIDE,    /* I32 or I64, as it is */
    OP_NUMBERS, /* F32, BF16, F16 or F8_E4M3, as it is */
    OP_STORED,  /* any dtype and shape, as it is: the op checks both */
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
    OP_LIMIT,    /* whole number >= -1 */
    OP_REAL,     /* finite and not 0: 0 means "default" to the library */
    OP_POSITIVE, /* finite and above 0 */
    OP_NATURAL,  /* finite and 0 or above */
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

/* The tensors of a quantised projection, for an op's list: P is the prefix of their names. */
#define OP_QUANTISED(P)                                                                                                \
    {.name = P "weight_scale_inv", .shape = "..", .kind = OP_STORED, .optional = true},                                \
        {.name = P "weight_scale", .shape = "..", .kind = OP_STORED, .optional = true},                                \
        {.name = P "scale", .shape = "..", .kind = OP_STORED, .optional = true},                                       \
        {.name = P "qweight", .shape = "..", .kind = OP_STORED, .optional = true},                                     \
        {.name = P "qzeros", .shape = "..", .kind = OP_STORED, .optional = true},                                      \
        {.name = P "scales", .shape = "..", .kind = OP_STORED, .optional = true},                                      \
        {.name = P "g_idx", .shape = "..", .kind = OP_STORED, .optional = true},                                       \
        {.name = P "weight_packed", .shape = "..", .kind = OP_STORED, .optional = true},                               \
        {.name = P "weight_shape", .shape = "..", .kind = OP_STORED, .optional = true},                                \
        {.name = P "weight_zero_point", .shape = "..", .kind = OP_STORED, .optional = true},                           \
        {.name = P "weight_g_idx", .shape = "..", .kind = OP_STORED, .optional = true},                                \
    {                                                                                                                  \
        .name = P "blocks", .shape = "..", .kind = OP_STORED, .optional = true                                         \
    }

/* The keys format, group, zero_convention and act, where they are in an op's list. */
#define OP_FORMATS "bf16,fp16,fp32,fp8_block,gptq,awq,ct,mxfp4"
#define OP_FORMAT_KEYS                                                                                                 \
    {.name = "format", .kind = OP_CHOICE, .choices = OP_FORMATS},                                                      \
        {.name = "group", .kind = OP_GROUP, .initial = "128"},                                                         \
    {                                                                                                                  \
        .name = "zero_convention", .kind = OP_CHOICE, .choices = "v1,v2", .initial = "v1"                              \
    }
/* NONE: as the tensor is stored. */
epmoe_format_t op_format(const op_context_t *context);

/* A projection [rows,cols], with `stacked` of `experts` experts in a leading dimension. Sizes that are -1 are what the
 * tensors say, and known afterwards. */
typedef struct op_projection_t {
    const char *plain;  /* name of the tensor that holds its weight or codes, */
    const char *prefix; /* and in front of its other tensors */
    bool stacked;
    int64_t experts;
    int64_t rows;
    int64_t cols;
    epmoe_layout_t layout; /* out: PACKED where the blocks of FP8 begin anew at the up rows, otherwise GATE_FIRST */
} op_projection_t;
/* Takes it in the format that the keys ask for, or as it is stored. INVALID_ARGUMENT names the tensor that is missing,
 * belongs to another format or has a wrong dtype or shape. */
epmoe_status_t op_take_projection(const op_context_t *context, op_projection_t *projection, epmoe_weight_t *weight);

/* The ops of tool_op_quant_ops.c. */
epmoe_status_t op_run_quantize_fp8(op_context_t *context);
epmoe_status_t op_run_dequant(op_context_t *context);
extern const op_tensor_t op_quantize_fp8_tensors[], op_dequant_tensors[];
extern const op_key_t op_quantize_fp8_keys[], op_dequant_keys[];

/* What an op that got no output or workspace returns. */
#define OP_NO_MEMORY epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the op's tensors")

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
