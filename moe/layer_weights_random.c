#include "moe/layer_weights.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"
#include "kernels/random_weights.h"

typedef struct random_job_t {
    void *dst;
    epmoe_dtype_t dtype;
    epmoei_random_tensor_t tensor;
    int64_t rows;
    int64_t cols;
    int64_t first_row;
    int64_t row_step;
} random_job_t;

static epmoe_status_t fill_random(const epmoe_layer_t *layer, const random_job_t *job, uint64_t seed, int32_t expert,
                                  epmoe_stream_t stream)
{
    if (!job->dst) return EPMOE_OK;
    /* Biases of gate and up are columns, so that their elements can alternate; their scale does not depend on cols. */
    float scale = epmoei_random_scale(job->tensor, job->cols);
#if EPMOE_HAVE_CUDA
    if (layer->backend == EPMOE_BACKEND_CUDA)
        return epmoei_random_fill_sm80(job->dst, job->dtype, seed, job->tensor, expert, job->rows, job->cols,
                                       job->first_row, job->row_step, scale, stream);
#endif
    (void)layer, (void)stream;
    int64_t row_bytes = job->cols * epmoe_dtype_size(job->dtype);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < job->rows; r++)
        epmoei_random_fill((char *)job->dst + (job->first_row + r * job->row_step) * row_bytes, job->dtype, seed,
                           job->tensor, expert, r * job->cols, job->cols, scale);
    return EPMOE_OK;
}

/* Gate or up rows of one expert, where the backend wants them. */
static random_job_t gate_up_job(const epmoe_layer_t *layer, void *dst, epmoe_dtype_t dtype,
                                epmoei_random_tensor_t tensor, int64_t f, int64_t cols, bool up)
{
    random_job_t job = {dst, dtype, tensor, f, cols, 0, 1};
    epmoei_packed_rows(layer, f, up, &job.first_row, &job.row_step);
    return job;
}

static epmoe_status_t fill_common(const epmoe_layer_t *layer, uint64_t seed, epmoe_stream_t stream)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *w = &layer->weights;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(config->weight_format);
    int64_t d = config->hidden, fs = config->shared_intermediate, n = config->num_experts;
    const random_job_t jobs[] = {
        {w->router, dtype, EPMOEI_RANDOM_ROUTER, n, d, 0, 1},
        {w->router_bias, EPMOE_F32, EPMOEI_RANDOM_ROUTER_BIAS, 1, n, 0, 1},
        {w->selection_bias, EPMOE_F32, EPMOEI_RANDOM_SELECTION_BIAS, 1, n, 0, 1},
        gate_up_job(layer, w->shared_gate_up, dtype, EPMOEI_RANDOM_SHARED_GATE_PROJ, fs, d, false),
        gate_up_job(layer, w->shared_gate_up, dtype, EPMOEI_RANDOM_SHARED_UP, fs, d, true),
        {w->shared_down, dtype, EPMOEI_RANDOM_SHARED_DOWN, d, fs, 0, 1},
        {w->shared_gate, dtype, EPMOEI_RANDOM_SHARED_GATE, 1, d, 0, 1},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_random(layer, &jobs[i], seed, 0, stream));
    return EPMOE_OK;
}

static epmoe_status_t fill_expert(const epmoe_layer_t *layer, uint64_t seed, int64_t e, epmoe_stream_t stream)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *w = &layer->weights;
    epmoe_format_t format = config->weight_format;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(format);
    int64_t d = config->hidden, f = config->intermediate;
    void *gate_up = epmoei_weight_element(w->gate_up, format, e * 2 * f * d);
    float *gate_up_bias = w->gate_up_bias ? w->gate_up_bias + e * 2 * f : NULL;
    const random_job_t jobs[] = {
        gate_up_job(layer, gate_up, dtype, EPMOEI_RANDOM_GATE, f, d, false),
        gate_up_job(layer, gate_up, dtype, EPMOEI_RANDOM_UP, f, d, true),
        {epmoei_weight_element(w->down, format, e * d * f), dtype, EPMOEI_RANDOM_DOWN, d, f, 0, 1},
        gate_up_job(layer, gate_up_bias, EPMOE_F32, EPMOEI_RANDOM_GATE_BIAS, f, 1, false),
        gate_up_job(layer, gate_up_bias, EPMOE_F32, EPMOEI_RANDOM_UP_BIAS, f, 1, true),
        {w->down_bias ? w->down_bias + e * d : NULL, EPMOE_F32, EPMOEI_RANDOM_DOWN_BIAS, 1, d, 0, 1},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_random(layer, &jobs[i], seed, layer->first_expert + (int32_t)e, stream));
    return EPMOE_OK;
}

static epmoe_status_t fill_all(const epmoe_layer_t *layer, uint64_t seed, epmoe_stream_t stream)
{
    EPMOEI_CHECK(fill_common(layer, seed, stream));
    for (int32_t e = 0; e < layer->local_experts; e++) EPMOEI_CHECK(fill_expert(layer, seed, e, stream));
    return epmoei_stream_wait(layer->backend, stream);
}

epmoe_status_t epmoe_layer_set_random_weights(epmoe_layer_t *layer, uint64_t seed)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    EPMOEI_CHECK(epmoei_comm_check_device(layer->comm));
    epmoe_stream_t stream = NULL;
    if (epmoei_format_is_quantised(layer->config.weight_format))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "config.weight_format is %s: random weights are fp32, bf16 or fp16",
                           epmoe_format_string(layer->config.weight_format));
    epmoei_layer_formats_t formats = epmoei_layer_config_formats(&layer->config);
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &formats));
    if (layer->backend == EPMOE_BACKEND_CUDA) EPMOEI_CHECK(epmoei_stream_create(&stream));
    epmoe_status_t status = fill_all(layer, seed, stream);
    epmoei_stream_destroy(stream);
    layer->has_weights = status == EPMOE_OK;
    return status;
}
