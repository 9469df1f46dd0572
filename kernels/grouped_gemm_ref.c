#include "kernels/grouped_gemm.h"

#include "base/dtype.h"
#include "base/fp8.h"
#include "kernels/activation.h"
#include "kernels/quant_formats.h"
#include "kernels/quantize_fp8.h"

static float dot(const epmoe_grouped_gemm_args_t *args, int32_t expert, int64_t row, int64_t x_row)
{
    epmoe_dtype_t w_dtype = epmoei_dtype_of_format(args->weight.format);
    int64_t w_first = ((int64_t)expert * args->n + row) * args->k;
    float sum = 0.0f;
    for (int32_t k = 0; k < args->k; k++)
        sum += epmoei_load(args->weight.data, w_dtype, w_first + k) *
               epmoei_load(args->x, args->x_dtype, x_row * args->k + k);
    return sum;
}

/* x of codes, or with fp8_activations: quantised in its 128 columns and back. */
static float quantised_x(const epmoe_grouped_gemm_args_t *args, int64_t x_row, int64_t k)
{
    if (args->x_quant) {
        epmoei_scale_steps_t steps = epmoei_scale_steps(args->x_quant, args->k);
        return epmoei_e4m3_to_f32(((const uint8_t *)args->x)[x_row * args->k + k]) *
               args->x_scale[x_row * steps.row + k / EPMOEI_FP8_COLUMNS * steps.block];
    }
    int64_t first = k / EPMOEI_FP8_COLUMNS * EPMOEI_FP8_COLUMNS,
            end = epmoei_min64(first + EPMOEI_FP8_COLUMNS, args->k);
    float amax = 0;
    for (int64_t i = first; i < end; i++)
        amax = epmoei_amax(amax, epmoei_load(args->x, args->x_dtype, x_row * args->k + i));
    float scale = epmoei_e4m3_scale(amax);
    return epmoei_e4m3_to_f32(epmoei_f32_to_e4m3(epmoei_load(args->x, args->x_dtype, x_row * args->k + k) / scale)) *
           scale;
}

static float quantised_dot(const epmoe_grouped_gemm_args_t *args, int32_t expert, int64_t row, bool up, int64_t x_row)
{
    epmoei_quant_t quant =
        epmoei_quant_of_weight(&args->weight, args->n, args->k, expert, epmoei_grouped_gemm_second_half(args));
    bool ordered = quant.format == EPMOE_FORMAT_W4 && quant.g_idx;
    float sum = 0.0f;
    for (int64_t k = 0; k < args->k; k++) {
        int64_t column = ordered ? epmoei_quant_index(&quant, up ? args->k + k : k) : k;
        float x = args->fp8_activations ? quantised_x(args, x_row, column)
                                        : epmoei_load(args->x, args->x_dtype, x_row * args->k + column);
        sum += epmoei_quant_at(&quant, row, k) * x;
    }
    return sum;
}

/* One row of w, which is one of the up rows or not, against one slot, up to the bias. */
static float projection(const epmoe_grouped_gemm_args_t *args, int32_t expert, int64_t row, bool up, int32_t x_row,
                        int32_t slot)
{
    float value = epmoei_format_is_quantised(args->weight.format) ? quantised_dot(args, expert, row, up, x_row)
                                                                  : dot(args, expert, row, x_row);
    if (args->weight_on_input) value *= args->row_weights[slot];
    if (args->bias) value += args->bias[(int64_t)expert * args->n + row];
    return value;
}

epmoe_status_t epmoei_grouped_gemm_ref(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    bool gated = epmoei_activation_is_gated(args->activation);
    bool interleaved = args->layout == EPMOE_LAYOUT_INTERLEAVED;
    int32_t n_out = gated ? args->n / 2 : args->n;
    for (int32_t e = 0; e < args->num_experts; e++)
        for (int32_t r = args->expert_offsets[e]; r < args->expert_offsets[e + 1]; r++) {
            int32_t slot = args->row_index ? args->row_index[r] : r;
            if (slot >= args->num_slots) continue;
            int32_t x_row = args->x_sorted ? r : slot / args->x_row_divisor;
            int64_t y_row = args->y_sorted ? r : slot;
            for (int32_t i = 0; i < n_out; i++) {
                float value;
                if (gated) {
                    float gate = projection(args, e, interleaved ? 2 * i : i, false, x_row, slot);
                    float up = projection(args, e, interleaved ? 2 * i + 1 : n_out + i, true, x_row, slot);
                    value = epmoei_activate(args->activation, gate, up, args->alpha, args->limit);
                } else {
                    value = projection(args, e, i, false, x_row, slot);
                    if (args->activation == EPMOE_ACTIVATION_SIGMOID) value = epmoei_sigmoid(value);
                }
                if (args->row_weights && !args->weight_on_input) value *= args->row_weights[slot];
                epmoei_store(args->y, args->y_dtype, y_row * n_out + i, value);
            }
        }
    return EPMOE_OK;
}

int64_t epmoei_grouped_gemm_workspace_ref(const epmoe_grouped_gemm_args_t *args)
{
    (void)args;
    return 0;
}
