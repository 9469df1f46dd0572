// One op alone, from C++: the router's choice for one row of logits, and its slots sorted by expert.
//
//     c++ -std=c++17 ops.cpp -o ops $(pkg-config --cflags --libs epmoe)
//
// SPDX-License-Identifier: Apache-2.0
#include <epmoe/epmoe.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <vector>

namespace
{
void check(epmoe_status_t status)
{
    if (status != EPMOE_OK) throw std::runtime_error(epmoe_last_error());
}
} // namespace

int main()
try {
    // Probabilities 0.1, 0.2, 0.3, 0.4: the best two are experts 3 and 2, renormalised to 4/7 and 3/7.
    const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(3.0f), std::log(4.0f)};
    std::vector<std::int32_t> ids(2);
    std::vector<float> weights(2);

    epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
    topk.backend = EPMOE_BACKEND_CPU; // vectors are host memory
    topk.num_tokens = 1;
    topk.num_experts = 4;
    topk.top_k = 2;
    topk.logits = logits.data();
    topk.scoring = EPMOE_SCORING_SOFTMAX;
    topk.renormalize = 1;
    topk.ids = ids.data();
    topk.weights = weights.data();
    check(epmoe_topk(&topk, nullptr));

    epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT;
    align.backend = topk.backend;
    align.num_tokens = topk.num_tokens;
    align.top_k = topk.top_k;
    align.num_experts = topk.num_experts;
    align.ids = ids.data();
    std::int64_t workspace_bytes = 0;
    check(epmoe_align_workspace_size(&align, &workspace_bytes));
    std::vector<char> workspace(static_cast<std::size_t>(workspace_bytes));
    const std::int64_t padded = epmoe_align_max_padded(1, 2, 4, 1);
    std::vector<std::int32_t> sorted_ids(static_cast<std::size_t>(padded));
    std::int32_t num_rows = 0;
    align.sorted_ids = sorted_ids.data();
    align.num_post_padded = &num_rows;
    align.workspace = workspace.data();
    align.workspace_bytes = workspace_bytes;
    check(epmoe_align_block_size(&align, nullptr));

    const bool ok = ids[0] == 3 && ids[1] == 2 && std::fabs(weights[0] - 4.0f / 7.0f) < 1e-6f &&
                    std::fabs(weights[1] - 3.0f / 7.0f) < 1e-6f && num_rows == 2 && sorted_ids[0] == 1 &&
                    sorted_ids[1] == 0;
    std::printf("experts %d (%.6f) and %d (%.6f), slots by expert: %d, %d: %s\n", ids[0],
                static_cast<double>(weights[0]), ids[1], static_cast<double>(weights[1]), sorted_ids[0], sorted_ids[1],
                ok ? "ok" : "WRONG");
    return ok ? 0 : 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "epmoe: %s\n", error.what());
    return 1;
}
