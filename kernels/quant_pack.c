#include "kernels/quant_pack.h"

enum { kGroups = 1024 }; /* counted in one pass over an index */

/* Where group g ends, if all groups but the last are of equal width. */
static int64_t group_end(const epmoei_quant_t *source, int64_t g)
{
    return epmoei_min64((g + 1) * source->group, source->cols);
}

/* Columns with group 0 first, then 1, ...; within a group they ascend. */
static void fill_order(const epmoei_quant_t *source, int32_t *order)
{
    int64_t groups = epmoei_ceil_div(source->cols, source->group);
    if (!source->g_idx || source->format == EPMOE_FORMAT_W4) {
        for (int64_t c = 0; c < source->cols; c++)
            order[c] = source->g_idx ? epmoei_quant_index(source, c) : (int32_t)c;
        return;
    }
    for (int64_t base = 0; base < groups; base += kGroups) {
        int64_t next[kGroups];
        for (int64_t i = 0; i < kGroups; i++) next[i] = (base + i) * source->group;
        for (int64_t c = 0; c < source->cols; c++) {
            int64_t g = epmoei_quant_index(source, c), i = g - base;
            if (i >= 0 && i < kGroups && next[i] < group_end(source, g)) order[next[i]++] = (int32_t)c;
        }
    }
}

typedef enum index_kind_t { INDEX_UNEVEN, INDEX_UNSORTED, INDEX_NONE } index_kind_t;

/* NONE: column c is in group c / group. UNEVEN: the groups are not of equal width. */
static index_kind_t index_kind(const epmoei_quant_t *source)
{
    int64_t groups = epmoei_ceil_div(source->cols, source->group);
    bool sorted = true;
    if (!source->g_idx) return INDEX_NONE;
    if (source->format == EPMOE_FORMAT_W4) return INDEX_UNSORTED;
    for (int64_t c = 0; c < source->cols && sorted; c++) sorted = epmoei_quant_index(source, c) == c / source->group;
    if (sorted) return INDEX_NONE;
    for (int64_t base = 0; base < groups; base += kGroups) {
        int64_t count[kGroups] = {0};
        for (int64_t c = 0; c < source->cols; c++) {
            int64_t i = epmoei_quant_index(source, c) - base;
            if (i >= 0 && i < kGroups) count[i]++;
        }
        for (int64_t g = base; g < epmoei_min64(base + kGroups, groups); g++)
            if (count[g - base] != group_end(source, g) - g * source->group) return INDEX_UNEVEN;
    }
    return INDEX_UNSORTED;
}

epmoei_pack_shape_t epmoei_pack_shape(const epmoei_quant_t *source)
{
    epmoei_pack_shape_t shape = {
        .format = source->format, .group = source->group, .scales_dtype = source->scales_dtype};
    if (source->format == EPMOE_FORMAT_FP8_BLOCK) {
        int32_t high = shape.row_group = epmoei_quant_row_group(source);
        bool starts = source->first_row % high == 0 || source->first_row == source->second_half;
        bool ends = !source->second_half || source->first_row >= source->second_half ||
                    source->first_row + source->rows <= source->second_half;
        if (high > 1 && (source->row_step != 1 || !starts || !ends)) shape.format = EPMOE_FORMAT_NONE;
        return shape;
    }
    if (source->format == EPMOE_FORMAT_MXFP4) return shape;
    index_kind_t kind = index_kind(source);
    shape.format = kind == INDEX_UNEVEN ? EPMOE_FORMAT_NONE : EPMOE_FORMAT_W4;
    shape.zeros = source->zeros != NULL;
    shape.order = kind == INDEX_UNSORTED;
    return shape;
}

epmoei_pack_shape_t epmoei_pack_merge(const epmoei_pack_shape_t *a, const epmoei_pack_shape_t *b)
{
    epmoei_pack_shape_t merged = *a;
    if (a->format != b->format || a->group != b->group || epmoei_pack_row_group(a) != epmoei_pack_row_group(b))
        merged.format = EPMOE_FORMAT_NONE;
    if (a->scales_dtype != b->scales_dtype) merged.scales_dtype = EPMOE_F32;
    merged.zeros |= b->zeros;
    merged.order |= b->order;
    return merged;
}

static int64_t target_row(const epmoei_pack_target_t *target, int64_t r)
{
    return target->first_row + r * target->row_step;
}

static void put_scale(const epmoei_quant_t *source, const epmoei_pack_target_t *target, int64_t from, int64_t to)
{
    if (target->shape.scales_dtype == EPMOE_F8_E8M0)
        ((uint8_t *)target->scales)[to] = ((const uint8_t *)source->scales)[from];
    else
        epmoei_store(target->scales, target->shape.scales_dtype, to, epmoei_quant_scale(source, from));
}

/* Blocks, so that each line of the source is fetched once. */
static void pack_transposed(const epmoei_quant_t *source, const epmoei_pack_target_t *target)
{
    enum { kBlock = 64 };
    const uint8_t *from = source->data;
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < source->rows; r0 += kBlock)
        for (int64_t c0 = 0; c0 < source->cols; c0 += kBlock)
            for (int64_t c = c0; c < epmoei_min64(c0 + kBlock, source->cols); c++)
                for (int64_t r = r0; r < epmoei_min64(r0 + kBlock, source->rows); r++)
                    ((uint8_t *)target->data)[target_row(target, r) * source->cols + c] =
                        from[c * source->stored_rows + source->first_row + r * source->row_step];
}

static void pack_blocks(const epmoei_quant_t *source, const epmoei_pack_target_t *target)
{
    int64_t cols = source->cols, groups = epmoei_ceil_div(cols, source->group), high = epmoei_quant_row_group(source);
    if (source->transposed) pack_transposed(source, target);
    for (int64_t r = 0; r < source->rows && !source->transposed; r++)
        memcpy((char *)target->data + target_row(target, r) * cols,
               (const char *)source->data +
                   (source->first_row + r * source->row_step) * epmoei_quant_stored_cols(source),
               (size_t)cols);
    for (int64_t r = 0; r < source->rows; r += high)
        for (int64_t g = 0; g < groups; g++)
            put_scale(source, target, epmoei_quant_scale_at(source, source->first_row + r * source->row_step, g),
                      (target->first_block + r / high) * groups + g);
}

static void pack_mxfp4_row(const epmoei_quant_t *source, const epmoei_pack_target_t *target, int64_t r)
{
    int64_t bytes = source->cols / 2, groups = source->cols / EPMOEI_MXFP4_GROUP, to = target_row(target, r);
    int64_t from = source->first_row + r * source->row_step;
    memcpy((char *)target->data + to * bytes,
           (const char *)source->data + from * (epmoei_quant_stored_cols(source) / 2), (size_t)bytes);
    for (int64_t g = 0; g < groups; g++)
        put_scale(source, target, epmoei_quant_scale_at(source, from, g), to * groups + g);
}

/* The codes of eight columns of the target, the first of them c. */
static uint32_t pack_word(const epmoei_quant_t *source, const epmoei_pack_target_t *target, int64_t from, int64_t c)
{
    int64_t count = epmoei_min64(8, source->cols - c), words = epmoei_ceil_div(epmoei_quant_stored_cols(source), 8);
    bool reordered = target->order && source->format != EPMOE_FORMAT_W4;
    uint32_t word = 0;
    if (!reordered && source->format != EPMOE_FORMAT_AWQ) {
        /* Stored as it is wanted, somewhere else. */
        int64_t at = source->format == EPMOE_FORMAT_GPTQ ? c / 8 * source->stored_rows + from : from * words + c / 8;
        memcpy(&word, (const char *)source->data + at * 4, 4);
        return count == 8 ? word : word & ((1u << (4 * count)) - 1);
    }
    for (int64_t i = 0; i < count; i++)
        word |= epmoei_quant_code(source, from, reordered ? target->order[c + i] : c + i) << (4 * i);
    return word;
}

/* Rows [first,end) of W4, a word of all of them at a time: in GPTQ and AWQ neighbouring rows are neighbours. */
static void pack_codes(const epmoei_quant_t *source, const epmoei_pack_target_t *target, int64_t first, int64_t end)
{
    int64_t words = epmoei_ceil_div(source->cols, 8);
    for (int64_t w = 0; w < words; w++)
        for (int64_t r = first; r < end; r++) {
            uint32_t word = pack_word(source, target, source->first_row + r * source->row_step, 8 * w);
            memcpy((char *)target->data + (target_row(target, r) * words + w) * 4, &word, 4);
        }
}

static void pack_row_groups(const epmoei_quant_t *source, const epmoei_pack_target_t *target, int64_t r)
{
    int64_t groups = epmoei_ceil_div(source->cols, source->group), to = target_row(target, r);
    int64_t from = source->first_row + r * source->row_step;
    for (int64_t g = 0; g < groups; g++) {
        put_scale(source, target, epmoei_quant_scale_at(source, from, g), to * groups + g);
        if (target->zeros) target->zeros[to * groups + g] = (uint8_t)epmoei_quant_zero(source, from, g);
    }
}

void epmoei_quant_pack(const epmoei_quant_t *source, const epmoei_pack_target_t *target)
{
    enum { kRows = 64 }; /* of a task: the lines of a transposed source are read whole */
    if (target->order) fill_order(source, target->order);
    if (target->shape.format == EPMOE_FORMAT_FP8_BLOCK) {
        pack_blocks(source, target);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < source->rows; first += kRows) {
        int64_t end = epmoei_min64(first + kRows, source->rows);
        if (target->shape.format == EPMOE_FORMAT_MXFP4) {
            for (int64_t r = first; r < end; r++) pack_mxfp4_row(source, target, r);
            continue;
        }
        pack_codes(source, target, first, end);
        for (int64_t r = first; r < end; r++) pack_row_groups(source, target, r);
    }
}
