/* What `moe_tool check` finds in a golden file, and how it judges a layer's outputs. */
#ifndef EPMOE_TOOLS_TOOL_CHECK_H
#define EPMOE_TOOLS_TOOL_CHECK_H

#include "moe/safetensors.h"
#include "tools/program.h"

/* What a golden file holds of one layer; NULL where it does not. */
typedef struct golden_layer_t {
    int32_t layer;
    const epmoei_tensor_t *in;        /* moe.in, or router.in where that is all there is */
    const epmoei_tensor_t *out;       /* moe.out0 */
    const epmoei_tensor_t *logits;    /* router.out0 */
    const epmoei_tensor_t *weights;   /* router.out1 */
    const epmoei_tensor_t *ids;       /* router.out2 */
    const epmoei_tensor_t *layer_in;  /* in: of the whole decoder layer */
    const epmoei_tensor_t *layer_out; /* out0 */
} golden_layer_t;

typedef struct golden_t {
    epmoei_safetensors_t *file;
    golden_layer_t *layers; /* ascending, only those with an input and something to compare */
    int32_t num_layers;
    const epmoei_tensor_t *logits;   /* of the model; NULL when one layer alone is wanted */
    const epmoei_tensor_t *last_out; /* out0 of the last layer that has one, */
    int32_t last_layer;              /* and its number */
    char unchecked[512];             /* names of what this version does not check; "" = none */
} golden_t;

/* `only` is the one layer wanted, or -1. INVALID_ARGUMENT when there is nothing to check. */
epmoe_status_t golden_open(const char *path, int32_t only, golden_t *golden);
void golden_close(golden_t *golden);
/* Adds to golden->unchecked. */
void golden_note_unchecked(golden_t *golden, const char *what);

/* The recorded values of one layer, converted; NULL where the file has none. */
typedef struct golden_values_t {
    int32_t num_tokens;
    float *in;      /* [T,d] */
    float *out;     /* [T,d] */
    float *logits;  /* [T,E] */
    float *weights; /* [T,k] */
    int32_t *ids;   /* [T,k] */
} golden_values_t;
/* A tensor as floats, [rows,cols] whatever its leading dimensions are; rows < 0 = any. NULL stays NULL. epmoei_free. */
epmoe_status_t golden_read_rows(const epmoei_tensor_t *tensor, int64_t rows, int64_t cols, float **values);
/* Every shape is checked against the layer's config. A dense layer has no router to compare. */
epmoe_status_t golden_read(const golden_layer_t *layer, const epmoe_layer_config_t *config, golden_values_t *values);
void golden_values_free(golden_values_t *values);

/* What the library computed for the same tokens; y already converted. logits, weights and ids as in golden_values_t. */
typedef struct check_outputs_t {
    const float *y;
    const float *logits;
    const float *weights;
    const int32_t *ids;
} check_outputs_t;

typedef struct check_result_t {
    double rel_err; /* |out-ref| / |ref| over all compared rows; NaN when a value is one */
    double max_abs;
    bool ids_equal;   /* false only when a recorded routing differs */
    int32_t near_tie; /* rows that are left out, see below */
    bool ok;
} check_result_t;

/* A row whose recorded scores are closer than this at the cut of the selection may be routed otherwise once its input
 * is rounded to 16 bits. Such a row, when it is, is left out and counted. Never in fp32. */
#define CHECK_NEAR_TIE 0.01

/* Judges routing and outputs. selection_bias [E] or NULL. `left_out` [T] gets the near ties. */
void check_router(const epmoe_layer_config_t *config, const float *selection_bias, const golden_values_t *golden,
                  const check_outputs_t *outputs, double tolerance, bool *left_out, check_result_t *result);
void check_moe(const epmoe_layer_config_t *config, const golden_values_t *golden, const check_outputs_t *outputs,
               double tolerance, const bool *left_out, bool ids_equal, check_result_t *result);

/* One rank's rows of a layer. */
typedef struct check_rows_t {
    void *x;
    void *y;
    float *logits;
    float *weights;
    int32_t *ids;
    int64_t bytes; /* of all of it, as laid out */
} check_rows_t;

/* Buffers of one layer: this rank's share of the rows, and after the gathering those of all ranks. */
typedef struct check_share_t {
    epmoe_backend_t backend;
    int32_t chunk;         /* rows per rank, the last ones partly or wholly empty */
    int32_t count;         /* rows of this rank */
    check_rows_t computed; /* in the backend's memory */
    check_rows_t own;      /* the same on the host */
    check_rows_t all;      /* of every rank; no x */
    float *all_y_f32;      /* all.y, converted */
    bool *left_out;
    float *selection_bias;
    void *computed_memory;
    void *host_memory;
} check_share_t;

/* chunk and count are set by the caller; everything is zeroed but what is in the backend's memory. */
epmoe_status_t check_share_make(check_share_t *share, epmoe_backend_t backend, const epmoe_layer_config_t *config,
                                int32_t ranks);
void check_share_free(check_share_t *share); /* a zeroed share is legal */
/* The rows of `own` to where they are computed on, and back, waiting for them and reporting what went wrong there. */
epmoe_status_t check_share_send(const check_share_t *share);
epmoe_status_t check_share_bring_home(const check_share_t *share);
/* Collective: every rank gets the rows of all ranks, in order. The last share is padded, so the padding is at the end.
 */
epmoe_status_t check_share_gather(const check_share_t *share, epmoe_comm_t *comm, const epmoe_layer_config_t *config);

/* One run of the command. */
typedef struct check_t {
    program_t *program;
    const char *dir;
    const char *golden_path;
    int64_t layer; /* -1 = all */
    int32_t wanted_backend;
    epmoe_backend_t backend;
    int32_t transport_index;
    int32_t dtype_index;
    epmoe_dtype_t dtype;
    double tolerance;         /* of MoE blocks, and of what is chained */
    double decoder_tolerance; /* of a decoder layer or the head from its recorded input */
    double timeout_s;
    int32_t format;
    int32_t fp8_activations; /* 0 or 1 */
    int32_t fp8_wire;        /* 0 or 1 */

    epmoe_checkpoint_t *checkpoint;
    golden_t golden;
    bool header_printed;
    int code; /* PROGRAM_FAILED once an item differs */

    bool decoders; /* decoder layers and logits are checked */
    float *chain;  /* fp32: what layer chain_next - 1 gave in a run from the first layer's input on; NULL = none */
    int32_t chain_next;
    int32_t chain_tokens;
} check_t;

/* Rank 0 prints the line of an item, and every item that differs on stderr. */
void check_report(check_t *check, const char *item, double tolerance, const check_result_t *result);
/* selection_bias [E] of a layer; zeros where it has none. */
epmoe_status_t check_selection_bias(const check_t *check, int32_t layer, int32_t num_experts, float *selection_bias);

/* Collective: the worst of all ranks' results, on every rank. */
epmoe_status_t check_gather_worst(const check_t *check, check_result_t *result);

/* Whether the checkpoint's decoder layers can run here; what cannot is noted as unchecked. */
epmoe_status_t check_decoders_begin(check_t *check);
/* One decoder layer from its recorded input, and from what the layer before gave. Collective: every rank runs all
 * sequences, and the worst of the ranks counts. */
epmoe_status_t check_decoder_layer(check_t *check, const golden_layer_t *golden);
/* The logits, from the last layer's recorded output and from the chain. */
epmoe_status_t check_logits(check_t *check);

#endif
