#include "dense_layers/sample.h"
#include "dense_layers/token_weight.h"

typedef struct row_t {
    const epmoe_sample_args_t *args;
    int64_t index;
    epmoei_sample_rule_t rule;
    float top; /* the largest logit */
} row_t;

static float logit(const row_t *row, int64_t token)
{
    return epmoei_tame_logit(
        epmoei_load(row->args->logits, row->args->logits_dtype, row->index * row->args->logits_stride + token));
}

static int64_t weight(const row_t *row, int64_t token)
{
    return epmoei_logit_weight(logit(row, token), row->top, row->rule.temperature);
}

/* Tokens in the order in which filters count them: by descending logit, then ascending id. The one behind `token`
 * (-1: the first); -1 when there is none. */
static int32_t next_token(const row_t *row, int32_t token)
{
    int32_t best = -1;
    for (int32_t i = 0; i < row->args->vocab_size; i++) {
        bool behind =
            token < 0 || logit(row, i) < logit(row, token) || (logit(row, i) == logit(row, token) && i > token);
        if (behind && (best < 0 || logit(row, i) > logit(row, best))) best = i;
    }
    return best;
}

/* The last token in that order that top-k and top-p leave. */
static int32_t last_kept(const row_t *row)
{
    int64_t sum = 0, before = 0;
    int32_t last = -1;
    if (row->rule.top_k == row->args->vocab_size) {
        for (int32_t i = 0; i < row->args->vocab_size; i++) sum += weight(row, i);
    } else {
        for (int32_t i = 0; i < row->rule.top_k; i++) {
            last = next_token(row, last);
            sum += weight(row, last);
        }
    }
    if (row->rule.top_p == 1.0f) return last;
    int64_t need = epmoei_share_up(row->rule.top_p, sum);
    for (last = next_token(row, -1);; last = next_token(row, last)) {
        before += weight(row, last);
        if (before >= need) return last;
    }
}

static int32_t draw(row_t *row)
{
    int32_t first = next_token(row, -1), vocab_size = row->args->vocab_size;
    row->top = logit(row, first);
    if (row->top == -INFINITY) return -1;
    if (row->rule.temperature == 0.0f) return first;

    bool all = row->rule.top_k == vocab_size && row->rule.top_p == 1.0f;
    int32_t last = all ? -1 : last_kept(row);
    int64_t least = epmoei_share_up(row->rule.min_p, (int64_t)EPMOEI_TOKEN_ONE), total = 0, sum = 0, target = -1;
    /* Once for the total, once to find the token. */
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < vocab_size; i++) {
            bool kept = all || logit(row, i) > logit(row, last) || (logit(row, i) == logit(row, last) && i <= last);
            int64_t w = weight(row, i);
            if (!kept || w < least) continue;
            if (pass == 0)
                total += w;
            else if ((sum += w) > target)
                return i;
        }
        target = epmoei_draw_target(row->args->uniform[row->index], total);
    }
    return -1;
}

epmoe_status_t epmoei_sample_ref(const epmoe_sample_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_sample_check_data(args));
    for (int64_t r = 0; r < args->num_rows; r++) {
        row_t row = {.args = args, .index = r, .rule = epmoei_sample_rule(args, r)};
        args->tokens[r] = draw(&row);
    }
    return EPMOE_OK;
}
