#include "base/dtype.h"
#include "comm/ep_rows.h"

#include <string.h>

#define PARALLEL_BYTES 65536 /* below this, several threads cost more than they bring */
#define CHUNK          1024  /* columns of one accumulator: stays in the first cache level */

epmoe_status_t epmoei_gather_rows_cpu(const epmoei_gather_rows_t *args)
{
#pragma omp parallel for schedule(static) if (args->num_rows * args->row_bytes > PARALLEL_BYTES)
    for (int64_t i = 0; i < args->num_rows; i++) {
        int64_t row = args->index[i + (i < args->gap_at ? 0 : args->gap)];
        memcpy((char *)args->dst + i * args->row_bytes, (const char *)args->src + row * args->row_bytes,
               (size_t)args->row_bytes);
    }
    return EPMOE_OK;
}

/* acc[c] += src[first + c] */
static void add_columns(float *restrict acc, const void *src, epmoe_dtype_t dtype, int64_t first, int64_t num)
{
    switch (dtype) {
    case EPMOE_F32:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_F32, first + c);
        break;
    case EPMOE_BF16:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_BF16, first + c);
        break;
    default:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_F16, first + c);
        break;
    }
}

static void sum_token(const epmoei_sum_rows_t *args, int64_t t)
{
    const char *rows[EPMOE_MAX_TOP_K];
    int32_t num_rows = 0;
    int64_t d = args->hidden, row_bytes = d * epmoe_dtype_size(args->row_dtype);
    if (!args->token_slots) rows[num_rows++] = (const char *)args->own + t * row_bytes;
    for (int32_t i = 0; i < args->width && args->token_slots; i++) {
        int64_t slot = args->token_slots[t * args->width + i], own = slot - args->first_own;
        if (slot < 0) break;
        if (own >= 0 && own < args->num_own)
            rows[num_rows++] = (const char *)args->own + own * row_bytes;
        else
            rows[num_rows++] = (const char *)args->others + (own < 0 ? slot : slot - args->num_own) * row_bytes;
    }

    for (int64_t first = 0; first < d; first += CHUNK) {
        float acc[CHUNK];
        int64_t num = epmoei_min64(CHUNK, d - first);
        memset(acc, 0, (size_t)num * sizeof *acc);
        for (int32_t i = 0; i < num_rows; i++) add_columns(acc, rows[i], args->row_dtype, first, num);
        if (args->shared) add_columns(acc, args->shared, EPMOE_F32, t * d + first, num);
        if (args->residual) add_columns(acc, args->residual, args->dtype, t * d + first, num);
        epmoei_from_f32((char *)args->y + (t * d + first) * epmoe_dtype_size(args->dtype), acc, args->dtype, num);
    }
}

epmoe_status_t epmoei_sum_rows_cpu(const epmoei_sum_rows_t *args)
{
    int64_t bytes = (int64_t)args->num_tokens * args->hidden * epmoe_dtype_size(args->row_dtype);
#pragma omp parallel for schedule(static) if (bytes > PARALLEL_BYTES)
    for (int64_t t = 0; t < args->num_tokens; t++) sum_token(args, t);
    return EPMOE_OK;
}

epmoe_status_t epmoei_gather_rows(epmoe_backend_t backend, const epmoei_gather_rows_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_gather_rows_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    return epmoei_gather_rows_cpu(args);
}

epmoe_status_t epmoei_sum_rows(epmoe_backend_t backend, const epmoei_sum_rows_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_sum_rows_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    return epmoei_sum_rows_cpu(args);
}

epmoe_status_t epmoei_store_count(epmoe_backend_t backend, int32_t *dst, int32_t value, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_store_count_sm80(dst, value, stream);
#endif
    (void)backend, (void)stream;
    *dst = value;
    return EPMOE_OK;
}
