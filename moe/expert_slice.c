#include "moe/expert_slice.h"

#include "base/dtype.h"

epmoe_status_t epmoei_check_slice(int32_t rank, int32_t size)
{
    if (size < 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_size is %d: expected at least 1, or 0 for 1",
                           size);
    if (rank < 0 || rank >= size)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_rank is %d: expected 0..%d, as tp_size is %d",
                           rank, size - 1, size);
    return EPMOE_OK;
}

epmoe_status_t epmoei_slice_width(const char *what, int32_t size, int32_t *width)
{
    if (*width % size)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_size is %d: expected a divisor of the %s %d", size,
                           what, *width);
    *width /= size;
    return EPMOE_OK;
}

static void move(epmoei_view_t *view, int64_t elements)
{
    view->data = (const char *)view->data + elements * epmoe_dtype_size(view->dtype);
}

static void take_rows(epmoei_view_t *view, epmoei_quant_source_t *source, int64_t first, int64_t count)
{
    if (!view->data) return;
    view->rows = count;
    if (source->quant.format == EPMOE_FORMAT_NONE)
        move(view, first * view->row_stride);
    else
        epmoei_quant_take_rows(&source->quant, first, count);
}

static void take_cols(epmoei_view_t *view, int64_t first, int64_t count)
{
    if (!view->data) return;
    view->cols = count;
    move(view, first * view->col_stride);
}

/* Whether every part can be taken: the ranks of a group, which do not hear of each other, come to one verdict. */
static epmoe_status_t check_down(const epmoei_quant_t *down, int32_t size, int64_t count, const char *name)
{
    for (int32_t r = 0; r < size; r++) {
        const int64_t first = r * count;
        epmoei_quant_t part = *down;
        const char *obstacle = epmoei_quant_take_cols(&part, first, count);
        if (obstacle)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "%s down is %s and options.tp_size %d: columns %lld..%lld cannot be taken: %s", name,
                               epmoe_format_string(down->format), size, (long long)first,
                               (long long)(first + count - 1), obstacle);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_slice_expert(epmoei_expert_source_t *expert, int32_t rank, int32_t size, const char *name)
{
    static const float zero = 0.0f;
    const int64_t count = expert->gate.rows / size, first = rank * count;
    if (size == 1) return EPMOE_OK;
    take_rows(&expert->gate, &expert->gate_quant, first, count);
    take_rows(&expert->up, &expert->up_quant, first, count);
    take_cols(&expert->gate_bias, first, count);
    take_cols(&expert->up_bias, first, count);
    if (rank > 0 && expert->down_bias.data)
        expert->down_bias = (epmoei_view_t){&zero, EPMOE_F32, 1, expert->down_bias.cols, 0, 0};
    if (expert->down_quant.quant.format == EPMOE_FORMAT_NONE) {
        take_cols(&expert->down, first, count);
        return EPMOE_OK;
    }
    epmoei_quant_t *down = &expert->down_quant.quant;
    EPMOEI_CHECK(check_down(down, size, count, name));
    (void)epmoei_quant_take_cols(down, first, count);
    expert->down.cols = count;
    expert->down_quant.indices = NULL;
    return EPMOE_OK;
}
