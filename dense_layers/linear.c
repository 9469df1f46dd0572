#include "dense_layers/linear.h"

#include "dense_layers/linear_cublas.h"
#include "dense_layers/self_attention_cuda.h"

static epmoe_grouped_gemm_args_t gemm_args(const epmoei_linear_t *linear, epmoe_backend_t backend, epmoe_dtype_t dtype,
                                           int32_t rows)
{
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = backend;
    gemm.num_experts = linear->heads;
    gemm.n = linear->n;
    gemm.k = linear->k;
    gemm.max_rows = rows * linear->heads;
    gemm.x_dtype = dtype;
    gemm.y_dtype = dtype;
    gemm.x_sorted = linear->heads == 1;
    gemm.weight.format = linear->format ? linear->format : EPMOE_FORMAT_F32;
    gemm.weight.data = linear->weight;
    gemm.bias = linear->bias;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    return gemm;
}

epmoe_status_t epmoei_linear_workspace(const epmoei_linear_t *linear, epmoe_backend_t backend, epmoe_dtype_t dtype,
                                       int32_t rows, int64_t *bytes)
{
    epmoe_grouped_gemm_args_t gemm = gemm_args(linear, backend, dtype, rows);
    EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(&gemm, bytes));
    if (backend == EPMOE_BACKEND_CUDA) *bytes = epmoei_max64(*bytes, epmoei_linear_cublas_workspace());
    return EPMOE_OK;
}

epmoe_status_t epmoei_linear(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows, const void *x,
                             epmoe_dtype_t y_dtype, void *y)
{
    if (run->backend == EPMOE_BACKEND_CUDA) {
        bool done;
        EPMOEI_CHECK(epmoei_linear_cublas(run, linear, rows, x, y_dtype, y, &done));
        if (done) return EPMOE_OK;
    }
    epmoe_grouped_gemm_args_t gemm = gemm_args(linear, run->backend, run->dtype, rows);
    gemm.x = x;
    gemm.y_dtype = y_dtype;
    gemm.y = y;
    gemm.workspace = run->workspace;
    gemm.workspace_bytes = run->workspace_bytes;
    return epmoe_grouped_gemm(&gemm, run->stream);
}

static epmoe_status_t fill_head_rows(const epmoei_linear_run_t *run, int32_t heads, int32_t rows)
{
#if EPMOE_HAVE_CUDA
    if (run->backend == EPMOE_BACKEND_CUDA)
        return epmoei_head_rows_fill_sm80(heads, rows, run->head_offsets, run->head_rows, run->stream);
#endif
    for (int32_t h = 0; h <= heads; h++) run->head_offsets[h] = h * rows;
    for (int32_t h = 0; h < heads; h++)
        for (int32_t r = 0; r < rows; r++) run->head_rows[(int64_t)h * rows + r] = r * heads + h;
    return EPMOE_OK;
}

/* The heads are the experts of a grouped GEMM: row r of head h is slot r * heads + h. */
epmoe_status_t epmoei_linear_heads(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows,
                                   const void *x, void *y)
{
    if (run->backend == EPMOE_BACKEND_CUDA) {
        bool done;
        EPMOEI_CHECK(epmoei_linear_cublas(run, linear, rows, x, run->dtype, y, &done));
        if (done) return EPMOE_OK;
    }
    EPMOEI_CHECK(fill_head_rows(run, linear->heads, rows));
    epmoe_grouped_gemm_args_t gemm = gemm_args(linear, run->backend, run->dtype, rows);
    gemm.x_sorted = 0;
    gemm.expert_offsets = run->head_offsets;
    gemm.row_index = run->head_rows;
    gemm.x = x;
    gemm.y = y;
    gemm.workspace = run->workspace;
    gemm.workspace_bytes = run->workspace_bytes;
    return epmoe_grouped_gemm(&gemm, run->stream);
}
