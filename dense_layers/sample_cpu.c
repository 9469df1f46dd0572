/* Nothing is sorted: the last token that top-k or top-p leaves is found by its logit's bits, from the highest down,
 * with a histogram of counts or weights at each of three levels. Every pass makes the weights anew, block by block. */
#include "dense_layers/sample.h"
#include "dense_layers/token_weight.h"
#include "kernels/row_blocks.h"
#include "kernels/row_max.h"

#define BLOCK EPMOEI_BLOCK_COLS
/* What top-k leaves is set aside if it is not more than this, and later passes see nothing else. */
#define LIST 4096
#define BINS 2048 /* of the widest level */

typedef struct row_t {
    const epmoe_sample_args_t *args;
    int64_t index;
    epmoei_sample_rule_t rule;
    float top; /* the largest logit */
    bool cut;  /* tokens behind (cut_logit, cut_id) are out */
    float cut_logit;
    int32_t cut_id;
    int32_t num_items; /* V, or the length of the list */
    bool listed;
    float logits[LIST]; /* tamed, by ascending id */
    int32_t ids[LIST];
} row_t;

/* Items first .. first+count-1: their tamed logits, in `buffer` or where the list has them. */
static const float *take(const row_t *row, int32_t first, int32_t count, float *buffer)
{
    if (row->listed) return row->logits + first;
    const epmoe_sample_args_t *args = row->args;
    epmoei_to_f32(buffer, epmoei_at(args->logits, args->logits_dtype, row->index * args->logits_stride + first),
                  args->logits_dtype, count);
#pragma omp simd
    for (int32_t i = 0; i < count; i++) buffer[i] = epmoei_tame_logit(buffer[i]);
    return buffer;
}

static int32_t id_of(const row_t *row, int32_t item) { return row->listed ? row->ids[item] : item; }

static bool is_kept(const row_t *row, float logit, int32_t item)
{
    return !row->cut || logit > row->cut_logit || (logit == row->cut_logit && id_of(row, item) <= row->cut_id);
}

static int32_t count_of(const row_t *row, int32_t first)
{
    return (int32_t)epmoei_min64(BLOCK, row->num_items - first);
}

/* The weights of a block; 0 for what is cut off. */
static void weigh(const row_t *row, const float *logits, int32_t first, int32_t count, int64_t *weights)
{
    float exps[BLOCK], top = row->top, temperature = row->rule.temperature;
#pragma omp simd
    for (int32_t i = 0; i < count; i++) exps[i] = epmoei_exp((logits[i] - top) / temperature) * EPMOEI_TOKEN_ONE;
    for (int32_t i = 0; i < count; i++) weights[i] = (int64_t)exps[i];
    if (!row->cut) return;
    for (int32_t i = 0; i < count; i++)
        if (!is_kept(row, logits[i], first + i)) weights[i] = 0;
}

static float find_top(const row_t *row)
{
    float buffer[BLOCK], top = -INFINITY;
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        float here = epmoei_row_max(take(row, first, count, buffer), count);
        top = here > top ? here : top;
    }
    return top;
}

/* The id of the n-th kept item (1 = the first) with this logit. */
static int32_t find_equal(const row_t *row, float logit, int64_t n)
{
    float buffer[BLOCK];
    int32_t id = -1;
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        const float *logits = take(row, first, count, buffer);
        for (int32_t i = 0; i < count; i++) {
            if (logits[i] != logit) continue;
            id = id_of(row, first + i);
            if (--n == 0) return id;
        }
    }
    return id;
}

/* Weights of at least `least`. */
static int64_t add_weights(const row_t *row, int64_t least)
{
    float buffer[BLOCK];
    int64_t weights[BLOCK], total = 0;
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        weigh(row, take(row, first, count, buffer), first, count, weights);
        for (int32_t i = 0; i < count; i++) total += weights[i] >= least ? weights[i] : 0;
    }
    return total;
}

/* ------------------------------------------------------------------------------------------------------- the cut */

/* Ascends as the logit does; never called with NaN or -0. */
static uint32_t to_key(float logit)
{
    uint32_t bits = epmoei_f32_bits(logit);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

static float from_key(uint32_t key) { return epmoei_f32_from_bits(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu)); }

/* Bits of the key that a level of the histogram tells apart: shift .. shift+bits-1; those above are known. */
typedef struct level_t {
    int32_t shift;
    int32_t bits;
} level_t;

/* Adds each item whose key agrees with `prefix` in the known bits to its bin: its weight, or 1. */
static void fill_bins(const row_t *row, bool by_weight, level_t level, uint32_t prefix, int64_t *bins)
{
    float buffer[BLOCK];
    int64_t weights[BLOCK];
    uint32_t low = (1u << level.bits) - 1,
             known = level.shift + level.bits < 32 ? ~((low << level.shift) | ((1u << level.shift) - 1)) : 0;
    memset(bins, 0, BINS * sizeof *bins);
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        const float *logits = take(row, first, count, buffer);
        if (by_weight) weigh(row, logits, first, count, weights);
        for (int32_t i = 0; i < count; i++) {
            uint32_t key = to_key(logits[i]);
            if ((key & known) == prefix) bins[key >> level.shift & low] += by_weight ? weights[i] : 1;
        }
    }
}

/* The largest logit at which the counts or weights of the items from it upwards reach `need`; *rest of them must come
 * from the items that have this very logit. */
static float find_logit(const row_t *row, bool by_weight, int64_t need, int64_t *rest)
{
    static const level_t levels[] = {{21, 11}, {10, 11}, {0, 10}};
    int64_t bins[BINS];
    uint32_t prefix = 0;
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++) {
        fill_bins(row, by_weight, levels[l], prefix, bins);
        uint32_t bin = (1u << levels[l].bits) - 1;
        for (; bin > 0 && bins[bin] < need; bin--) need -= bins[bin];
        prefix |= bin << levels[l].shift;
    }
    *rest = need;
    return from_key(prefix);
}

static void cut_top_k(row_t *row)
{
    int64_t rest;
    row->cut_logit = find_logit(row, false, row->rule.top_k, &rest);
    row->cut_id = find_equal(row, row->cut_logit, rest);
    row->cut = true;
    if (row->rule.top_k > LIST) return;

    float buffer[BLOCK];
    int32_t listed = 0;
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        const float *logits = take(row, first, count, buffer);
        for (int32_t i = 0; i < count; i++) {
            if (logits[i] < row->cut_logit || !is_kept(row, logits[i], first + i)) continue;
            row->logits[listed] = logits[i];
            row->ids[listed++] = first + i;
        }
    }
    row->listed = true;
    row->num_items = listed;
    row->cut = false;
}

static void cut_top_p(row_t *row)
{
    int64_t rest, total = add_weights(row, 0);
    float logit = find_logit(row, true, epmoei_share_up(row->rule.top_p, total), &rest);
    int64_t each = epmoei_logit_weight(logit, row->top, row->rule.temperature);
    row->cut_id = find_equal(row, logit, epmoei_ceil_div(rest, each));
    row->cut_logit = logit;
    row->cut = true;
}

/* ---------------------------------------------------------------------------------------------------------- draw */

static int32_t find_drawn(const row_t *row, int64_t least, int64_t target)
{
    float buffer[BLOCK];
    int64_t weights[BLOCK], sum = 0;
    for (int32_t first = 0; first < row->num_items; first += BLOCK) {
        int32_t count = count_of(row, first);
        weigh(row, take(row, first, count, buffer), first, count, weights);
        for (int32_t i = 0; i < count; i++) {
            sum += weights[i] >= least ? weights[i] : 0;
            if (sum > target) return id_of(row, first + i);
        }
    }
    return -1;
}

static int32_t draw(row_t *row)
{
    row->top = find_top(row);
    if (row->top == -INFINITY) return -1;
    if (row->rule.temperature == 0.0f) return find_equal(row, row->top, 1);
    if (row->rule.top_k < row->num_items) cut_top_k(row);
    if (row->rule.top_p < 1.0f) cut_top_p(row);
    int64_t least = epmoei_share_up(row->rule.min_p, (int64_t)EPMOEI_TOKEN_ONE);
    int64_t target = epmoei_draw_target(row->args->uniform[row->index], add_weights(row, least));
    return find_drawn(row, least, target);
}

epmoe_status_t epmoei_sample_cpu(const epmoe_sample_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_sample_check_data(args));
    bool parallel = (int64_t)args->num_rows * args->vocab_size >= EPMOEI_MIN_PARALLEL_ELEMENTS;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
    for (int64_t r = 0; r < args->num_rows; r++) {
        row_t row;
        row.args = args;
        row.index = r;
        row.rule = epmoei_sample_rule(args, r);
        row.cut = row.listed = false;
        row.num_items = args->vocab_size;
        args->tokens[r] = draw(&row);
    }
    return EPMOE_OK;
}
