#include "moe/layer_weights.h"

#include "base/dtype.h"
#include "kernels/random_weights.h"

typedef struct random_job_t {
    void *dst;
    epmoe_dtype_t dtype;
    epmoei_random_tensor_t tensor;
    int64_t rows;
    int64_t cols;
} random_job_t;

static void fill_random(const random_job_t *job, uint64_t seed, int32_t expert)
{
    if (!job->dst) return;
    float scale = epmoei_random_scale(job->tensor, job->cols);
    int64_t row_bytes = job->cols * epmoe_dtype_size(job->dtype);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < job->rows; r++)
        epmoei_random_fill((char *)job->dst + r * row_bytes, job->dtype, seed, job->tensor, expert, r * job->cols,
                           job->cols, scale);
}

epmoe_status_t epmoe_layer_set_random_weights(epmoe_layer_t *layer, uint64_t seed)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    const epmoe_layer_config_t *config = &layer->config;
    epmoe_format_t format = config->weight_format;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(format);
    epmoe_format_t shared_format = config->shared_intermediate ? format : EPMOE_FORMAT_NONE;
    epmoei_layer_formats_t formats = {dtype, format, format, shared_format, shared_format};
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &formats));

    epmoei_packed_weights_t *w = &layer->weights;
    int64_t d = config->hidden, f = config->intermediate, fs = config->shared_intermediate, n = config->num_experts;
    const random_job_t common[] = {
        {w->router, dtype, EPMOEI_RANDOM_ROUTER, n, d},
        {w->router_bias, EPMOE_F32, EPMOEI_RANDOM_ROUTER_BIAS, 1, n},
        {w->selection_bias, EPMOE_F32, EPMOEI_RANDOM_SELECTION_BIAS, 1, n},
        {w->shared_gate_up, dtype, EPMOEI_RANDOM_SHARED_GATE_PROJ, fs, d},
        {epmoei_weight_element(w->shared_gate_up, format, fs * d), dtype, EPMOEI_RANDOM_SHARED_UP, fs, d},
        {w->shared_down, dtype, EPMOEI_RANDOM_SHARED_DOWN, d, fs},
        {w->shared_gate, dtype, EPMOEI_RANDOM_SHARED_GATE, 1, d},
    };
    for (size_t i = 0; i < sizeof common / sizeof common[0]; i++) fill_random(&common[i], seed, 0);
    for (int32_t e = 0; e < layer->local_experts; e++) {
        const random_job_t own[] = {
            {epmoei_weight_element(w->gate_up, format, e * 2 * f * d), dtype, EPMOEI_RANDOM_GATE, f, d},
            {epmoei_weight_element(w->gate_up, format, (e * 2 * f + f) * d), dtype, EPMOEI_RANDOM_UP, f, d},
            {epmoei_weight_element(w->down, format, e * d * f), dtype, EPMOEI_RANDOM_DOWN, d, f},
            {w->gate_up_bias ? w->gate_up_bias + e * 2 * f : NULL, EPMOE_F32, EPMOEI_RANDOM_GATE_BIAS, 1, f},
            {w->gate_up_bias ? w->gate_up_bias + e * 2 * f + f : NULL, EPMOE_F32, EPMOEI_RANDOM_UP_BIAS, 1, f},
            {w->down_bias ? w->down_bias + e * d : NULL, EPMOE_F32, EPMOEI_RANDOM_DOWN_BIAS, 1, d},
        };
        for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) fill_random(&own[i], seed, layer->first_expert + e);
    }
    layer->has_weights = true;
    return EPMOE_OK;
}
