/* A part of a quantised projection, where it is: the slice that a rank of a tensor-parallel group holds. */
#include "kernels/quant_formats.h"

void epmoei_quant_take_rows(epmoei_quant_t *quant, int64_t first, int64_t count)
{
    quant->first_row += first * quant->row_step;
    quant->rows = count;
}

/* Whether g_idx says what its absence would. */
static bool is_plain_order(const epmoei_quant_t *quant)
{
    const bool permutes = quant->format == EPMOE_FORMAT_W4;
    for (int64_t c = 0; c < quant->cols; c++)
        if (epmoei_quant_index(quant, c) != (permutes ? c : c / quant->group)) return false;
    return true;
}

const char *epmoei_quant_take_cols(epmoei_quant_t *quant, int64_t first, int64_t count)
{
    const int64_t stored = epmoei_quant_stored_cols(quant), group = first / quant->group;
    if (quant->g_idx && !is_plain_order(quant)) return "its g_idx puts columns of all slices into one group";
    const bool halves_group = quant->format == EPMOE_FORMAT_MXFP4 && count % EPMOEI_MXFP4_GROUP;
    if (halves_group || (first % quant->group && (first + count - 1) / quant->group != group))
        return "the slice cuts its groups";
    int64_t data = 0, scales = group, zeros = group; /* bytes, elements, and words or bytes to go on */
    const int64_t row_words = epmoei_ceil_div(quant->stored_rows, 8);
    const int64_t whole = quant->format == EPMOE_FORMAT_FP8_BLOCK ? 1 : quant->format == EPMOE_FORMAT_MXFP4 ? 2 : 8;
    if (first % whole) return "the slice cuts its words of eight codes";
    switch (quant->format) {
    case EPMOE_FORMAT_FP8_BLOCK:
        data = quant->transposed ? first * quant->stored_rows : first;
        if (quant->transposed) scales *= epmoei_ceil_div(quant->stored_rows, epmoei_quant_row_group(quant));
        break;
    case EPMOE_FORMAT_MXFP4: data = first / 2; break;
    case EPMOE_FORMAT_GPTQ:
    case EPMOE_FORMAT_AWQ:
        data = (quant->format == EPMOE_FORMAT_GPTQ ? first / 8 * quant->stored_rows : first * row_words) * 4;
        scales = group * quant->stored_rows;
        zeros = group * row_words * 4;
        break;
    case EPMOE_FORMAT_CT_W4:
        data = first / 8 * 4;
        zeros = group * 4;
        break;
    default: data = first / 8 * 4; break;
    }
    quant->data = (const char *)quant->data + data;
    quant->scales = (const char *)quant->scales + scales * epmoe_dtype_size(quant->scales_dtype);
    if (quant->zeros) quant->zeros = (const char *)quant->zeros + zeros;
    quant->g_idx = NULL;
    quant->stored_cols = stored;
    quant->cols = count;
    return NULL;
}
