#include "moe/layer_weights.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"
#include "kernels/random_quant.h"

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

/* One expert's quantised matrix. */
typedef struct quant_job_t {
    epmoei_random_tensor_t tensor;
    epmoei_random_tensor_t second; /* with halves, of the up rows */
    const epmoei_pack_shape_t *pack;
    void *data;
    const epmoei_pack_arrays_t *arrays;
    int64_t rows; /* of a tensor */
    int64_t cols;
    bool halves;
} quant_job_t;

static epmoe_status_t fill_quantised(epmoei_quant_writer_t *writer, uint64_t seed, const quant_job_t *job, int64_t e,
                                     int32_t expert)
{
    const epmoei_pack_shape_t *pack = job->pack;
    int64_t rows = job->halves ? 2 * job->rows : job->rows;
    if (!job->data) return EPMOE_OK;
    epmoei_matrix_sizes_t sizes =
        epmoei_matrix_sizes(writer->backend, pack->format, pack, rows, job->cols, job->halves);
    const epmoei_quant_matrix_t matrix = {
        .pack = pack,
        .rows = rows,
        .cols = job->cols,
        .halves = job->halves,
        .data = (char *)job->data + e * sizes.data,
        .arrays = {.scales = (char *)job->arrays->scales + e * sizes.scales,
                   .zeros = job->arrays->zeros ? job->arrays->zeros + e * sizes.zeros : NULL},
    };
    EPMOEI_CHECK(epmoei_quant_writer_begin(writer, &matrix));
    for (int half = 0; half < (job->halves ? 2 : 1); half++) {
        epmoei_random_tensor_t tensor = half ? job->second : job->tensor;
        const epmoei_random_quant_t random = {pack->format, pack->group, seed, tensor, expert, job->cols};
        epmoei_pack_target_t target = epmoei_quant_writer_target(writer, half);
        epmoei_random_quant_fill(&random, job->rows, &target);
    }
    return epmoei_quant_writer_end(writer);
}

static epmoe_status_t fill_quantised_shared(const epmoe_layer_t *layer, epmoei_quant_writer_t *writer, uint64_t seed)
{
    const epmoei_packed_weights_t *w = &layer->weights;
    const epmoei_pack_shape_t *gate_up = &w->formats.shared_gate_up_pack, *down = &w->formats.shared_down_pack;
    int64_t d = layer->config.hidden, fs = layer->config.shared_intermediate;
    const quant_job_t jobs[] = {
        {EPMOEI_RANDOM_SHARED_GATE_PROJ, EPMOEI_RANDOM_SHARED_UP, gate_up, w->shared_gate_up, &w->shared_gate_up_arrays,
         fs, d, true},
        {EPMOEI_RANDOM_SHARED_DOWN, EPMOEI_RANDOM_SHARED_DOWN, down, w->shared_down, &w->shared_down_arrays, d, fs,
         false},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_quantised(writer, seed, &jobs[i], 0, 0));
    return EPMOE_OK;
}

static epmoe_status_t fill_quantised_expert(const epmoe_layer_t *layer, epmoei_quant_writer_t *writer, uint64_t seed,
                                            int64_t e)
{
    const epmoei_packed_weights_t *w = &layer->weights;
    const epmoei_pack_shape_t *gate_up = &w->formats.gate_up_pack, *down = &w->formats.down_pack;
    int64_t d = layer->config.hidden, f = layer->config.intermediate;
    const quant_job_t jobs[] = {
        {EPMOEI_RANDOM_GATE, EPMOEI_RANDOM_UP, gate_up, w->gate_up, &w->gate_up_arrays, f, d, true},
        {EPMOEI_RANDOM_DOWN, EPMOEI_RANDOM_DOWN, down, w->down, &w->down_arrays, d, f, false},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_quantised(writer, seed, &jobs[i], e, epmoei_layer_expert(layer, (int32_t)e)));
    return EPMOE_OK;
}

static epmoe_status_t fill_common(const epmoe_layer_t *layer, epmoei_quant_writer_t *writer, uint64_t seed,
                                  epmoe_stream_t stream)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *w = &layer->weights;
    bool quantised = epmoei_format_is_quantised(config->weight_format);
    /* Router and shared gate are plain whatever the experts are. */
    epmoe_dtype_t dtype = w->formats.router;
    void *shared_gate_up = quantised ? NULL : w->shared_gate_up, *shared_down = quantised ? NULL : w->shared_down;
    int64_t d = config->hidden, fs = config->shared_intermediate, n = config->num_experts;
    const random_job_t jobs[] = {
        {w->router, dtype, EPMOEI_RANDOM_ROUTER, n, d, 0, 1},
        {w->router_bias, EPMOE_F32, EPMOEI_RANDOM_ROUTER_BIAS, 1, n, 0, 1},
        {w->selection_bias, EPMOE_F32, EPMOEI_RANDOM_SELECTION_BIAS, 1, n, 0, 1},
        gate_up_job(layer, shared_gate_up, dtype, EPMOEI_RANDOM_SHARED_GATE_PROJ, fs, d, false),
        gate_up_job(layer, shared_gate_up, dtype, EPMOEI_RANDOM_SHARED_UP, fs, d, true),
        {shared_down, dtype, EPMOEI_RANDOM_SHARED_DOWN, d, fs, 0, 1},
        {w->shared_gate, dtype, EPMOEI_RANDOM_SHARED_GATE, 1, d, 0, 1},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_random(layer, &jobs[i], seed, 0, stream));
    return quantised ? fill_quantised_shared(layer, writer, seed) : EPMOE_OK;
}

static epmoe_status_t fill_expert(const epmoe_layer_t *layer, epmoei_quant_writer_t *writer, uint64_t seed, int64_t e,
                                  epmoe_stream_t stream)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *w = &layer->weights;
    epmoe_format_t format = config->weight_format;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(format);
    int64_t d = config->hidden, f = config->intermediate;
    bool quantised = epmoei_format_is_quantised(format);
    void *gate_up = quantised ? NULL : epmoei_weight_element(w->gate_up, format, e * 2 * f * d);
    void *down = quantised ? NULL : epmoei_weight_element(w->down, format, e * d * f);
    if (quantised) EPMOEI_CHECK(fill_quantised_expert(layer, writer, seed, e));
    float *gate_up_bias = w->gate_up_bias ? w->gate_up_bias + e * 2 * f : NULL;
    const random_job_t jobs[] = {
        gate_up_job(layer, gate_up, dtype, EPMOEI_RANDOM_GATE, f, d, false),
        gate_up_job(layer, gate_up, dtype, EPMOEI_RANDOM_UP, f, d, true),
        {down, dtype, EPMOEI_RANDOM_DOWN, d, f, 0, 1},
        gate_up_job(layer, gate_up_bias, EPMOE_F32, EPMOEI_RANDOM_GATE_BIAS, f, 1, false),
        gate_up_job(layer, gate_up_bias, EPMOE_F32, EPMOEI_RANDOM_UP_BIAS, f, 1, true),
        {w->down_bias ? w->down_bias + e * d : NULL, EPMOE_F32, EPMOEI_RANDOM_DOWN_BIAS, 1, d, 0, 1},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++)
        EPMOEI_CHECK(fill_random(layer, &jobs[i], seed, epmoei_layer_expert(layer, (int32_t)e), stream));
    return EPMOE_OK;
}

static int64_t expert_bytes(const epmoe_layer_t *layer)
{
    const epmoei_layer_formats_t *formats = &layer->weights.formats;
    const int64_t d = layer->config.hidden, f = layer->config.intermediate;
    return epmoei_matrix_sizes(layer->backend, formats->gate_up, &formats->gate_up_pack, 2 * f, d, true).total +
           epmoei_matrix_sizes(layer->backend, formats->down, &formats->down_pack, d, f, false).total;
}

static epmoe_status_t fill_all(const epmoe_layer_t *layer, epmoei_quant_writer_t *writer, uint64_t seed,
                               const epmoe_load_options_t *options, epmoe_stream_t stream)
{
    const int64_t bytes = expert_bytes(layer);
    EPMOEI_CHECK(fill_common(layer, writer, seed, stream));
    for (int32_t e = 0; e < layer->local_experts; e++) {
        EPMOEI_CHECK(fill_expert(layer, writer, seed, e, stream));
        if (!options || !options->progress) continue;
        EPMOEI_CHECK(epmoei_stream_wait(layer->backend, stream));
        if (options->progress(options->progress_ctx, (e + 1) * bytes, layer->local_experts * bytes))
            return epmoei_fail(EPMOE_ERROR_BAD_STATE, "random weights were cancelled by the progress callback");
    }
    return epmoei_stream_wait(layer->backend, stream);
}

/* Random ones have the format that was asked for, or none. */
static epmoe_status_t check_cuda_packs(const epmoe_layer_t *layer, const epmoei_layer_formats_t *formats)
{
    const epmoe_layer_config_t *config = &layer->config;
    const int32_t cols[] = {config->hidden, config->intermediate, config->shared_intermediate};
    if (layer->backend != EPMOE_BACKEND_CUDA || !epmoei_format_is_quantised(config->weight_format)) return EPMOE_OK;
    for (size_t i = 0; i < sizeof cols / sizeof cols[0]; i++) {
        const char *why = cols[i] ? epmoei_quant_cuda_obstacle(&formats->down_pack, cols[i]) : NULL;
        if (why)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "on CUDA a matrix of %d columns in %s cannot be computed: %s",
                               cols[i], epmoe_format_string(config->weight_format), why);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_layer_random_weights(epmoe_layer_t *layer, uint64_t seed, const epmoe_load_options_t *options)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    EPMOEI_CHECK(epmoei_comm_check_device(layer->comm));
    epmoe_stream_t stream = NULL;
    const epmoe_layer_config_t *config = &layer->config;
    if (config->weight_format == EPMOE_FORMAT_MXFP4 &&
        (config->hidden % EPMOEI_MXFP4_GROUP || config->intermediate % EPMOEI_MXFP4_GROUP ||
         config->shared_intermediate % EPMOEI_MXFP4_GROUP))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "config.weight_format is mxfp4 with hidden %d, intermediate %d, shared_intermediate %d: "
                           "expected multiples of %d",
                           config->hidden, config->intermediate, config->shared_intermediate, EPMOEI_MXFP4_GROUP);
    epmoei_layer_formats_t formats = epmoei_layer_config_formats(&layer->config);
    EPMOEI_CHECK(check_cuda_packs(layer, &formats));
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &formats));
    EPMOEI_CHECK(epmoei_layer_fit_workspace(layer));
    if (layer->backend == EPMOE_BACKEND_CUDA) EPMOEI_CHECK(epmoei_stream_create(&stream));
    epmoei_quant_writer_t writer;
    epmoei_quant_writer_open(&writer, layer->backend, stream);
    epmoe_status_t status = fill_all(layer, &writer, seed, options, stream);
    epmoei_quant_writer_close(&writer);
    epmoei_stream_destroy(stream);
    if (status == EPMOE_OK) status = epmoei_layer_tile_weights(layer);
    layer->has_weights = status == EPMOE_OK;
    return status;
}

epmoe_status_t epmoe_layer_set_random_weights(epmoe_layer_t *layer, uint64_t seed)
{
    return epmoei_layer_random_weights(layer, seed, NULL);
}
