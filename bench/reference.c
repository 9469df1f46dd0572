#include "bench/reference.h"

#include "base/dtype.h"
#include "kernels/blas_threads.h"
#include "kernels/quantize_fp8.h"
#include "kernels/random_quant.h"

#include <cblas.h>
#include <math.h>

#define BLOCK_ROWS 64 /* of a weight matrix that a thread holds in double at a time */

/* Row-major [rows,cols], either random or a view. Elements are rounded to dtype, those of a view with NONE are not. */
typedef struct matrix_t {
    int64_t rows;
    int64_t cols;
    const reference_t *reference; /* random: else NULL */
    epmoei_random_tensor_t tensor;
    int32_t expert;
    epmoe_dtype_t dtype;
    epmoei_view_t view;
    epmoei_quant_t quant; /* of a quantised view: never rounded */
    bool quantised;       /* random: in the config's weight_format */
} matrix_t;

static matrix_t random_matrix(const reference_t *reference, epmoei_random_tensor_t tensor, int32_t expert, int64_t rows,
                              int64_t cols, epmoe_dtype_t dtype)
{
    return (matrix_t){rows, cols, reference, tensor, expert, dtype, {0}, {0}, false};
}

static matrix_t view_matrix(epmoei_view_t view, epmoe_dtype_t dtype)
{
    return (matrix_t){.rows = view.rows, .cols = view.cols, .dtype = dtype, .view = view};
}

static matrix_t source_matrix(epmoei_view_t view, const epmoei_quant_source_t *source, epmoe_dtype_t dtype)
{
    matrix_t matrix = view_matrix(view, dtype);
    matrix.quant = source->quant;
    return matrix;
}

/* Of a checkpoint's matrices; its biases are kept as they are. */
static epmoe_dtype_t view_dtype(const reference_t *reference)
{
    return reference->rounds_checkpoint ? reference->weight_dtype : EPMOE_DTYPE_NONE;
}

static int32_t random_group(const matrix_t *matrix)
{
    return matrix->reference->config->weight_format == EPMOE_FORMAT_MXFP4 ? EPMOEI_MXFP4_GROUP : 128;
}

/* Row r of the matrix as doubles. */
static void read_row(const matrix_t *matrix, int64_t r, double *dst)
{
    enum { kPiece = 512 };
    for (int64_t first = 0; first < matrix->cols; first += kPiece) {
        int64_t count = epmoei_min64(kPiece, matrix->cols - first);
        if (matrix->reference && matrix->quantised) {
            float values[kPiece];
            const epmoei_random_quant_t random = {matrix->reference->config->weight_format,
                                                  random_group(matrix),
                                                  matrix->reference->seed,
                                                  matrix->tensor,
                                                  matrix->expert,
                                                  matrix->cols};
            epmoei_random_quant_values(&random, r, first, count, values);
            for (int64_t c = 0; c < count; c++) dst[first + c] = (double)values[c];
        } else if (matrix->reference) {
            float values[kPiece], scale = epmoei_random_scale(matrix->tensor, matrix->cols);
            char rounded[4 * kPiece];
            epmoei_random_fill(rounded, matrix->dtype, matrix->reference->seed, matrix->tensor, matrix->expert,
                               r * matrix->cols + first, count, scale);
            epmoei_to_f32(values, rounded, matrix->dtype, count);
            for (int64_t c = 0; c < count; c++) dst[first + c] = (double)values[c];
        } else if (matrix->quant.format != EPMOE_FORMAT_NONE) {
            for (int64_t c = first; c < first + count; c++) dst[c] = (double)epmoei_quant_at(&matrix->quant, r, c);
        } else {
            const epmoei_view_t *view = &matrix->view;
            for (int64_t c = first; c < first + count; c++)
                dst[c] = (double)epmoei_round_to(
                    epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride), matrix->dtype);
        }
    }
}

/* y [m,rows] = x [m,cols] matrix^T (+ bias, a matrix of one row). Each thread makes and multiplies blocks of its own,
 * since making the weights takes as long as multiplying them. */
static epmoe_status_t multiply(const matrix_t *matrix, const matrix_t *bias, const double *x, int32_t m, double *y)
{
    int64_t n = matrix->rows, k = matrix->cols, rows = epmoei_min64(n, BLOCK_ROWS);
    bool failed = false;
    epmoei_blas_region_begin();
#pragma omp parallel reduction(|| : failed)
    {
        double *block = epmoei_alloc(rows * k * 8), *added = epmoei_alloc(n * 8);
        failed = !block || !added;
        if (bias && !failed) read_row(bias, 0, added);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < n; first += BLOCK_ROWS) {
            int64_t count = epmoei_min64(rows, n - first);
            if (failed) continue;
            for (int64_t r = 0; r < count; r++) read_row(matrix, first + r, block + r * k);
            cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, (int)count, (int)k, 1, x, (int)k, block, (int)k, 0,
                        y + first, (int)n);
            for (int64_t i = 0; i < m && bias; i++)
                for (int64_t c = first; c < first + count; c++) y[i * n + c] += added[c];
        }
        epmoei_free(added);
        epmoei_free(block);
    }
    epmoei_blas_region_end();
    if (failed)
        return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%lld bytes for reference weights", (long long)(rows * k * 8));
    return EPMOE_OK;
}

epmoe_status_t reference_multiply(const reference_t *reference, const epmoei_view_t *weight, const epmoei_view_t *bias,
                                  const double *x, int32_t rows, double *y)
{
    const matrix_t matrix = view_matrix(*weight, view_dtype(reference));
    if (rows == 0) return EPMOE_OK;
    if (!bias || !bias->data) return multiply(&matrix, NULL, x, rows, y);
    const matrix_t added = view_matrix(*bias, EPMOE_DTYPE_NONE);
    return multiply(&matrix, &added, x, rows, y);
}

static double silu(double x) { return x == -INFINITY ? 0 : x / (1 + exp(-x)); }

static double activate(const epmoe_layer_config_t *config, double gate, double up)
{
    bool oai = config->activation == EPMOE_ACTIVATION_SWIGLU_OAI;
    double limit = config->limit > 0 ? (double)config->limit : oai ? 7.0 : INFINITY;
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
    if (oai) {
        double alpha = config->alpha != 0 ? (double)config->alpha : 1.702;
        return gate / (1 + exp(-alpha * gate)) * (up + 1);
    }
    if (config->activation == EPMOE_ACTIVATION_GELU) return 0.5 * gate * (1 + erf(gate * sqrt(0.5))) * up;
    if (config->activation == EPMOE_ACTIVATION_GELU_TANH)
        return 0.5 * gate * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    return silu(gate) * up;
}

/* The matrices of an expert; a bias without rows is absent. */
typedef struct expert_t {
    matrix_t gate, up, down, gate_bias, up_bias, down_bias;
} expert_t;

static expert_t random_expert(const reference_t *reference, int32_t expert)
{
    const epmoe_layer_config_t *config = reference->config;
    epmoe_dtype_t dtype = reference->weight_dtype;
    bool shared = expert == REFERENCE_SHARED;
    int64_t d = config->hidden, f = shared ? config->shared_intermediate : config->intermediate;
    int32_t id = shared ? 0 : expert;
    expert_t made = {
        .gate = random_matrix(reference, shared ? EPMOEI_RANDOM_SHARED_GATE_PROJ : EPMOEI_RANDOM_GATE, id, f, d, dtype),
        .up = random_matrix(reference, shared ? EPMOEI_RANDOM_SHARED_UP : EPMOEI_RANDOM_UP, id, f, d, dtype),
        .down = random_matrix(reference, shared ? EPMOEI_RANDOM_SHARED_DOWN : EPMOEI_RANDOM_DOWN, id, d, f, dtype),
    };
    made.gate.quantised = made.up.quantised = made.down.quantised = epmoei_format_is_quantised(config->weight_format);
    if (config->expert_has_bias && !shared) {
        made.gate_bias = random_matrix(reference, EPMOEI_RANDOM_GATE_BIAS, id, 1, f, EPMOE_F32);
        made.up_bias = random_matrix(reference, EPMOEI_RANDOM_UP_BIAS, id, 1, f, EPMOE_F32);
        made.down_bias = random_matrix(reference, EPMOEI_RANDOM_DOWN_BIAS, id, 1, d, EPMOE_F32);
    }
    return made;
}

static epmoe_status_t find_expert(const reference_t *reference, int32_t expert, expert_t *found)
{
    epmoei_layer_source_t layer;
    epmoei_expert_source_t source;
    if (!reference->checkpoint) {
        *found = random_expert(reference, expert);
        return EPMOE_OK;
    }
    if (expert == REFERENCE_SHARED) {
        EPMOEI_CHECK(epmoei_checkpoint_layer_source(reference->checkpoint, reference->layer, &layer));
        source = layer.shared;
    } else {
        EPMOEI_CHECK(epmoei_checkpoint_expert_source(reference->checkpoint, reference->layer, expert, &source));
    }
    epmoe_dtype_t dtype = view_dtype(reference);
    *found = (expert_t){
        .gate = source_matrix(source.gate, &source.gate_quant, dtype),
        .up = source_matrix(source.up, &source.up_quant, dtype),
        .down = source_matrix(source.down, &source.down_quant, dtype),
        .gate_bias = view_matrix(source.gate_bias, EPMOE_DTYPE_NONE),
        .up_bias = view_matrix(source.up_bias, EPMOE_DTYPE_NONE),
        .down_bias = view_matrix(source.down_bias, EPMOE_DTYPE_NONE),
    };
    return EPMOE_OK;
}

static const matrix_t *present(const matrix_t *matrix)
{
    return matrix->reference || matrix->view.data ? matrix : NULL;
}

/* y[row,:] *= sigmoid(x[row,:] . gate), the shared expert's. */
static epmoe_status_t apply_shared_gate(const reference_t *reference, const double *x, int32_t rows, double *y)
{
    epmoe_status_t status;
    int64_t d = reference->config->hidden;
    matrix_t gate = random_matrix(reference, EPMOEI_RANDOM_SHARED_GATE, 0, 1, d, reference->weight_dtype);
    double *scores = NULL;
    if (reference->checkpoint) {
        epmoei_layer_source_t layer;
        EPMOEI_CHECK(epmoei_checkpoint_layer_source(reference->checkpoint, reference->layer, &layer));
        gate = view_matrix(layer.shared_gate, view_dtype(reference));
    }
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&scores, (int64_t)rows * 8, "reference gate"), done);
    EPMOEI_CHECK_GOTO(multiply(&gate, NULL, x, rows, scores), done);
    for (int32_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < d; c++) y[i * d + c] /= 1 + exp(-scores[i]);
done:
    epmoei_free(scores);
    return status;
}

/* What is left of rows [rows,cols] after rounding to dtype and quantising, 128 columns per scale. */
static epmoe_status_t quantise_rows(double *x, int64_t rows, int64_t cols, epmoe_dtype_t dtype)
{
    bool failed = false;
#pragma omp parallel for schedule(static) reduction(|| : failed)
    for (int64_t i = 0; i < rows; i++) {
        float *row = epmoei_alloc(cols * 4);
        failed = failed || !row;
        if (!row) continue;
        for (int64_t c = 0; c < cols; c++) row[c] = epmoei_round_to((float)x[i * cols + c], dtype);
        epmoei_quantize_fp8_round_row(row, cols);
        for (int64_t c = 0; c < cols; c++) x[i * cols + c] = (double)row[c];
        epmoei_free(row);
    }
    return failed ? epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%lld bytes for a reference row", (long long)(cols * 4))
                  : EPMOE_OK;
}

/* x as the routed experts get it with FP8 on the wire. */
static epmoe_status_t round_rows(double *x, int64_t rows, int64_t cols, epmoe_dtype_t dtype)
{
    EPMOEI_CHECK(quantise_rows(x, rows, cols, dtype));
    for (int64_t i = 0; i < rows * cols; i++) x[i] = (double)epmoei_round_to((float)x[i], dtype);
    return EPMOE_OK;
}

epmoe_status_t reference_expert(const reference_t *reference, int32_t expert, const double *x, const double *weights,
                                int32_t rows, double *y)
{
    epmoe_status_t status;
    const epmoe_layer_config_t *config = reference->config;
    double *gate = NULL, *up = NULL, *codes = NULL;
    bool fp8 = expert == REFERENCE_SHARED ? reference->fp8_shared : reference->fp8_experts;
    bool rounds = expert != REFERENCE_SHARED && config->wire_dtype == EPMOE_F8_E4M3;
    expert_t source;
    if (rows == 0) return EPMOE_OK;
    EPMOEI_CHECK(find_expert(reference, expert, &source));
    int64_t d = config->hidden, f = source.gate.rows;
    bool on_input = weights && config->weight_on_input;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&gate, rows * f * 8, "reference rows"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&up, rows * f * 8, "reference rows"), done);
    if (fp8 || rounds) {
        EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&codes, rows * d * 8, "reference rows"), done);
        memcpy(codes, x, (size_t)(rows * d * 8));
        if (rounds) EPMOEI_CHECK_GOTO(round_rows(codes, rows, d, config->dtype), done);
        if (fp8) EPMOEI_CHECK_GOTO(quantise_rows(codes, rows, d, config->dtype), done);
    }
    const double *seen = fp8 || rounds ? codes : x;
    if (on_input) {
        /* The product is linear: weighting the input is weighting the product before the bias. */
        double *weighted = NULL;
        EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&weighted, rows * d * 8, "reference rows"), done);
        for (int64_t i = 0; i < rows * d; i++) weighted[i] = seen[i] * weights[i / d];
        status = multiply(&source.gate, present(&source.gate_bias), weighted, rows, gate);
        if (status == EPMOE_OK) status = multiply(&source.up, present(&source.up_bias), weighted, rows, up);
        epmoei_free(weighted);
        if (status != EPMOE_OK) goto done;
    } else {
        EPMOEI_CHECK_GOTO(multiply(&source.gate, present(&source.gate_bias), seen, rows, gate), done);
        EPMOEI_CHECK_GOTO(multiply(&source.up, present(&source.up_bias), seen, rows, up), done);
    }
    for (int64_t i = 0; i < rows * f; i++) gate[i] = activate(config, gate[i], up[i]);
    if (fp8) EPMOEI_CHECK_GOTO(quantise_rows(gate, rows, f, config->dtype), done);
    EPMOEI_CHECK_GOTO(multiply(&source.down, present(&source.down_bias), gate, rows, y), done);
    for (int64_t i = 0; i < rows * d && weights && !on_input; i++) y[i] *= weights[i / d];
    if (expert == REFERENCE_SHARED && config->shared_gated) status = apply_shared_gate(reference, x, rows, y);
done:
    epmoei_free(codes);
    epmoei_free(up);
    epmoei_free(gate);
    return status;
}

epmoe_status_t reference_router(const reference_t *reference, const double *x, int32_t rows, double *logits)
{
    const epmoe_layer_config_t *config = reference->config;
    matrix_t router, bias;
    if (rows == 0) return EPMOE_OK;
    if (reference->checkpoint) {
        epmoei_layer_source_t layer;
        EPMOEI_CHECK(epmoei_checkpoint_layer_source(reference->checkpoint, reference->layer, &layer));
        router = view_matrix(layer.router, view_dtype(reference));
        bias = view_matrix(layer.router_bias, EPMOE_DTYPE_NONE);
    } else {
        router = random_matrix(reference, EPMOEI_RANDOM_ROUTER, 0, config->num_experts, config->hidden,
                               reference->weight_dtype);
        bias = random_matrix(reference, EPMOEI_RANDOM_ROUTER_BIAS, 0, 1, config->num_experts, EPMOE_F32);
    }
    return multiply(&router, config->router_has_bias ? &bias : NULL, x, rows, logits);
}

epmoe_status_t reference_selection_bias(const reference_t *reference, float *bias)
{
    int32_t num_experts = reference->config->num_experts;
    memset(bias, 0, (size_t)num_experts * sizeof *bias);
    if (!reference->config->has_selection_bias) return EPMOE_OK;
    if (!reference->checkpoint) {
        epmoei_random_fill(bias, EPMOE_F32, reference->seed, EPMOEI_RANDOM_SELECTION_BIAS, 0, 0, num_experts,
                           epmoei_random_scale(EPMOEI_RANDOM_SELECTION_BIAS, num_experts));
        return EPMOE_OK;
    }
    epmoei_layer_source_t layer;
    EPMOEI_CHECK(epmoei_checkpoint_layer_source(reference->checkpoint, reference->layer, &layer));
    epmoei_view_t view = layer.selection_bias;
    for (int32_t e = 0; e < num_experts; e++) bias[e] = epmoei_load(view.data, view.dtype, e * view.col_stride);
    return EPMOE_OK;
}
