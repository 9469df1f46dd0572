#include "dense_layers/spec_verify.h"
#include "dense_layers/token_weight.h"
#include "kernels/row_blocks.h"

#define BLOCK EPMOEI_BLOCK_COLS

/* A draw from max(p - q, 0); q NULL = 0, but 1 at `certain` if that is an id. */
typedef struct draw_t {
    const float *p;
    const float *q;
    int32_t certain;
    int32_t vocab_size;
} draw_t;

static int64_t weigh(const draw_t *draw, int32_t first, int32_t count, int64_t *weights)
{
    float rest[BLOCK];
    int64_t total = 0;
#pragma omp simd
    for (int32_t i = 0; i < count; i++) rest[i] = epmoei_tame_probability(draw->p[first + i]);
    if (draw->q) {
#pragma omp simd
        for (int32_t i = 0; i < count; i++) {
            float left = rest[i] - epmoei_tame_probability(draw->q[first + i]);
            rest[i] = epmoei_select(left > 0.0f, left, 0.0f);
        }
    }
    if (draw->certain >= first && draw->certain < first + count) rest[draw->certain - first] = 0.0f;
    for (int32_t i = 0; i < count; i++) {
        weights[i] = (int64_t)(rest[i] * EPMOEI_TOKEN_ONE);
        total += weights[i];
    }
    return total;
}

static int32_t run_draw(const draw_t *draw, float uniform)
{
    int64_t weights[BLOCK], total = 0, sum = 0;
    for (int32_t first = 0; first < draw->vocab_size; first += BLOCK)
        total += weigh(draw, first, (int32_t)epmoei_min64(BLOCK, draw->vocab_size - first), weights);
    if (total == 0) {
        if (!draw->q && draw->certain < 0) return -1;
        draw_t whole = {.p = draw->p, .certain = -1, .vocab_size = draw->vocab_size};
        return run_draw(&whole, uniform);
    }
    int64_t target = epmoei_draw_target(uniform, total);
    for (int32_t first = 0; first < draw->vocab_size; first += BLOCK) {
        int32_t count = (int32_t)epmoei_min64(BLOCK, draw->vocab_size - first);
        int64_t block = weigh(draw, first, count, weights);
        if (sum + block <= target) {
            sum += block;
            continue;
        }
        for (int32_t i = 0; i < count; i++)
            if ((sum += weights[i]) > target) return first + i;
    }
    return -1;
}

static void verify_row(const epmoe_spec_verify_args_t *args, int64_t row)
{
    bool rejected;
    int32_t accepted = epmoei_spec_accept(args, row, &rejected);
    int32_t *tokens = args->tokens + row * (args->num_drafts + 1);
    draw_t draw = {.p = epmoei_spec_target(args, row, accepted), .certain = -1, .vocab_size = args->vocab_size};
    if (rejected) {
        draw.q = epmoei_spec_draft(args, row, accepted);
        if (!draw.q) draw.certain = args->draft_ids[row * args->num_drafts + accepted];
    }
    for (int32_t g = 0; g < accepted; g++) tokens[g] = args->draft_ids[row * args->num_drafts + g];
    tokens[accepted] = run_draw(&draw, args->uniform[row * (args->num_drafts + 1) + args->num_drafts]);
    for (int32_t g = accepted + 1; g <= args->num_drafts; g++) tokens[g] = -1;
    args->accepted[row] = accepted;
}

epmoe_status_t epmoei_spec_verify_cpu(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_spec_verify_check_data(args));
    bool parallel = (int64_t)args->num_rows * args->vocab_size >= EPMOEI_MIN_PARALLEL_ELEMENTS;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
    for (int64_t row = 0; row < args->num_rows; row++) verify_row(args, row);
    return EPMOE_OK;
}
