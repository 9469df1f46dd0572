#include "kernels/dequant.h"

#include "kernels/quant_formats.h"

enum { kStrip = 512 }; /* columns of a row that is stored in another order */

static void ordered_row(const epmoei_quant_t *quant, int64_t r, float *row)
{
    float strip[kStrip];
    for (int64_t first = 0; first < quant->cols; first += kStrip) {
        int64_t count = epmoei_min64(kStrip, quant->cols - first);
        epmoei_quant_row(quant, r, first, count, strip);
        for (int64_t i = 0; i < count; i++) row[epmoei_quant_index(quant, first + i)] = strip[i];
    }
}

epmoe_status_t epmoei_dequant_cpu(const epmoe_dequant_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    const epmoe_weight_t *weight = &args->weight;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(weight->format);
    bool ordered = weight->format == EPMOE_FORMAT_W4 && weight->g_idx;
    int64_t n = args->n, k = args->k;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < args->num_experts * n; row++) {
        float *w = args->w + row * k;
        if (dtype != EPMOE_DTYPE_NONE) {
            epmoei_to_f32(w, (const char *)weight->data + row * k * epmoe_dtype_size(dtype), dtype, k);
            continue;
        }
        epmoei_quant_t quant = epmoei_quant_of_weight(weight, n, k, row / n, 0);
        if (ordered)
            ordered_row(&quant, row % n, w);
        else
            epmoei_quant_row(&quant, row % n, 0, k, w);
    }
    return EPMOE_OK;
}
