#include "dense_layers/spec_verify.h"
#include "dense_layers/token_weight.h"

/* What token `id` weighs in the draw at place g: what the target has above the draft, or all of it. */
static int64_t weight(const epmoe_spec_verify_args_t *args, int64_t row, int32_t g, int32_t id, bool difference)
{
    float p = epmoei_spec_target(args, row, g)[id], q = 0.0f;
    const float *draft = epmoei_spec_draft(args, row, g);
    if (difference) q = draft ? draft[id] : id == args->draft_ids[row * args->num_drafts + g] ? 1.0f : 0.0f;
    return epmoei_probability_weight(p, q);
}

static int32_t draw(const epmoe_spec_verify_args_t *args, int64_t row, int32_t g, bool difference)
{
    int64_t total = 0, sum = 0;
    for (int32_t id = 0; id < args->vocab_size; id++) total += weight(args, row, g, id, difference);
    if (total == 0) return difference ? draw(args, row, g, false) : -1;
    int64_t target = epmoei_draw_target(args->uniform[row * (args->num_drafts + 1) + args->num_drafts], total);
    for (int32_t id = 0; id < args->vocab_size; id++)
        if ((sum += weight(args, row, g, id, difference)) > target) return id;
    return -1;
}

epmoe_status_t epmoei_spec_verify_ref(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_spec_verify_check_data(args));
    for (int64_t row = 0; row < args->num_rows; row++) {
        bool rejected;
        int32_t accepted = epmoei_spec_accept(args, row, &rejected);
        int32_t *tokens = args->tokens + row * (args->num_drafts + 1);
        for (int32_t g = 0; g < accepted; g++) tokens[g] = args->draft_ids[row * args->num_drafts + g];
        tokens[accepted] = draw(args, row, accepted, rejected);
        for (int32_t g = accepted + 1; g <= args->num_drafts; g++) tokens[g] = -1;
        args->accepted[row] = accepted;
    }
    return EPMOE_OK;
}
