#include "kernels/dequant.h"

#include "kernels/quant_formats.h"

epmoe_status_t epmoei_dequant_ref(const epmoe_dequant_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    const epmoe_weight_t *weight = &args->weight;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(weight->format);
    bool ordered = weight->format == EPMOE_FORMAT_W4 && weight->g_idx;
    int64_t n = args->n, k = args->k;
    for (int64_t e = 0; e < args->num_experts; e++)
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = 0; c < k; c++) {
                float *row = args->w + (e * n + r) * k;
                if (dtype != EPMOE_DTYPE_NONE) {
                    row[c] = epmoei_load(weight->data, dtype, (e * n + r) * k + c);
                    continue;
                }
                epmoei_quant_t quant = epmoei_quant_of_weight(weight, n, k, e, 0);
                row[ordered ? epmoei_quant_index(&quant, c) : c] = epmoei_quant_at(&quant, r, c);
            }
    return EPMOE_OK;
}
