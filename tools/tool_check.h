/* What `moe_tool check` finds in a golden file, and how it judges a layer's outputs. */
#ifndef EPMOE_TOOLS_TOOL_CHECK_H
#define EPMOE_TOOLS_TOOL_CHECK_H

#include "moe/safetensors.h"

/* What a golden file holds of one layer; NULL where it does not. */
typedef struct golden_layer_t {
    int32_t layer;
    const epmoei_tensor_t *in;      /* moe.in, or router.in where that is all there is */
    const epmoei_tensor_t *out;     /* moe.out0 */
    const epmoei_tensor_t *logits;  /* router.out0 */
    const epmoei_tensor_t *weights; /* router.out1 */
    const epmoei_tensor_t *ids;     /* router.out2 */
} golden_layer_t;

typedef struct golden_t {
    epmoei_safetensors_t *file;
    golden_layer_t *layers; /* ascending, only those with an input and something to compare */
    int32_t num_layers;
    char unchecked[256]; /* names of what this version does not check; "" = none */
} golden_t;

/* `only` is the one layer wanted, or -1. INVALID_ARGUMENT when there is nothing to check. */
epmoe_status_t golden_open(const char *path, int32_t only, golden_t *golden);
void golden_close(golden_t *golden);

/* The recorded values of one layer, converted; NULL where the file has none. */
typedef struct golden_values_t {
    int32_t num_tokens;
    float *in;      /* [T,d] */
    float *out;     /* [T,d] */
    float *logits;  /* [T,E] */
    float *weights; /* [T,k] */
    int32_t *ids;   /* [T,k] */
} golden_values_t;
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

#endif
