/* moe_tool info: what it says of a checkpoint, and its plan of what each rank takes. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <jansson.h>

TestSuite(tool_info, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 300);

#define GOLDEN EPMOE_TEST_DATA "/golden/"

static void refuses(const char *arguments, const char *needle)
{
    testing_process_t process = testing_tool("%s", arguments);
    cr_assert_eq(process.exit_code, 2, "exit %d: %s", process.exit_code, process.errors);
    cr_assert(strstr(process.errors, needle) != NULL, "stderr lacks '%s': %s", needle, process.errors);
    cr_assert_str_empty(process.output);
    testing_process_free(&process);
}

Test(tool_info, says_what_a_checkpoint_is)
{
    testing_process_t process = testing_tool("info '" GOLDEN "deepseek_v3' --ranks 3 --max-tokens 64 --format json");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(strchr(process.output, '\n') + 1, process.output + strlen(process.output), "more than a line");
    json_t *info = json_loads(process.output, 0, NULL), *router = json_object_get(info, "router");
    cr_assert_str_eq(json_string_value(json_object_get(info, "family")), "deepseek_v3");
    cr_assert_str_eq(json_string_value(json_object_get(info, "format")), "bf16");
    static const struct {
        const char *name;
        int value;
    } numbers[] = {{"num_layers", 2}, {"hidden", 64},       {"num_experts", 16},
                   {"top_k", 4},      {"intermediate", 32}, {"shared_intermediate", 32}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        cr_assert_eq(json_integer_value(json_object_get(info, numbers[i].name)), numbers[i].value, "%s",
                     numbers[i].name);
    cr_assert_str_eq(json_string_value(json_object_get(router, "scoring")), "sigmoid");
    cr_assert_eq(json_integer_value(json_object_get(router, "n_group")), 4);
    cr_assert_eq(json_integer_value(json_object_get(router, "topk_group")), 2);
    cr_assert_eq(json_real_value(json_object_get(router, "scale")), 2.5);
    cr_assert_eq(json_integer_value(json_array_get(json_object_get(info, "moe_layers"), 0)), 1);
    cr_assert_eq(json_integer_value(json_array_get(json_object_get(info, "dense_layers"), 0)), 0);
    json_t *attention = json_object_get(info, "attention");
    cr_assert_str_eq(json_string_value(json_object_get(attention, "kind")), "mla");
    cr_assert_eq(json_integer_value(json_object_get(attention, "head_dim")), 24);
    cr_assert_eq(json_integer_value(json_object_get(attention, "kv_bytes_per_token")), 2 * (16 + 8) * 2);
    json_t *ranks = json_object_get(info, "ranks");
    cr_assert_eq(json_array_size(ranks), 3);
    json_int_t first[] = {0, 6, 11}, count[] = {6, 5, 5};
    for (size_t r = 0; r < 3; r++) {
        json_t *rank = json_array_get(ranks, r);
        cr_assert_eq(json_integer_value(json_object_get(rank, "first_expert")), first[r]);
        cr_assert_eq(json_integer_value(json_object_get(rank, "local_experts")), count[r]);
        cr_assert(json_integer_value(json_object_get(rank, "weight_bytes")) > count[r] * 3 * 32 * 64 * 2);
        cr_assert(json_integer_value(json_object_get(rank, "workspace_bytes")) > 0);
    }
    testing_process_free(&process);
    json_decref(info);

    process = testing_tool("info '" GOLDEN "gpt_oss'");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert(strstr(process.output, "gpt_oss") && strstr(process.output, "topk_softmax") &&
              strstr(process.output, "swiglu_oai") && strstr(process.output, "0-7"));
    /* Two layers, two kv heads of 16, keys and values of two bytes. */
    cr_assert(strstr(process.output, "gqa, 4 heads, 2 kv heads of 16, sinks, window 8 in 1 of 2 layers") &&
                  strstr(process.output, "scaling yarn") && strstr(process.output, "256 B per token"),
              "%s", process.output);
    testing_process_free(&process);
    refuses("info none", "none");
    refuses("info '" GOLDEN "gpt_oss' --ranks 0", "--ranks");
    refuses("info", "DIR");
}

/* deepseek_v3's toy: 16 experts, 4 of them for each token; rank 0 of 2 has 8. */
Test(tool_info, prints_the_tiles)
{
    /* On sm90 for a mean of m and a small expert m + 3 sqrt(m): bf16 rounded up to 64, w4 to 16; fp8 by fp8 64 up to 64
     * of these. */
    static const struct {
        const char *tokens;
        int rows, sm80_bf16, sm80_quant, sm90_bf16, sm90_w4, sm90_fp8, cluster;
        const char *line;
    } cases[] = {{"1", 4, 16, 16, 64, 16, 64, 1, "of 4 rows for 8 experts, at most: sm80 bf16 16, fp8 and w4 16"},
                 {"50", 200, 256, 32, 64, 48, 64, 1, "sm90 bf16 64, w4 48, fp8 by fp8 64\n"},      /* mean 25 */
                 {"100", 400, 256, 64, 128, 80, 128, 1, "sm90 bf16 128, w4 80, fp8 by fp8 128\n"}, /* mean 50 */
                 {"4096", 16384, 256, 64, 256, 256, 128, 2, "fp8 by fp8 128 in pairs\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process =
            testing_tool("info '" GOLDEN "deepseek_v3' --ranks 2 --max-tokens %s --format json", cases[i].tokens);
        json_t *info = json_loads(process.output, 0, NULL), *tiles = json_object_get(info, "tiles");
        json_t *sm80 = json_object_get(tiles, "sm80"), *sm90 = json_object_get(tiles, "sm90");
        cr_expect_eq(json_integer_value(json_object_get(tiles, "rows")), cases[i].rows, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(tiles, "experts")), 8);
        cr_expect_eq(json_integer_value(json_object_get(sm80, "bf16")), cases[i].sm80_bf16, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm80, "fp8")), cases[i].sm80_quant, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm80, "w4")), cases[i].sm80_quant, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm90, "bf16")), cases[i].sm90_bf16, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm90, "w4")), cases[i].sm90_w4, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm90, "fp8")), cases[i].sm90_fp8, "%s", process.output);
        cr_expect_eq(json_integer_value(json_object_get(sm90, "fp8_cluster")), cases[i].cluster, "%s", process.output);
        json_decref(info);
        testing_process_free(&process);
        process = testing_tool("info '" GOLDEN "deepseek_v3' --ranks 2 --max-tokens %s", cases[i].tokens);
        cr_expect(strstr(process.output, cases[i].line), "%s: %s", cases[i].line, process.output);
        testing_process_free(&process);
    }
}

static json_int_t rank_number(const json_t *info, size_t rank, const char *name)
{
    const json_t *value = json_object_get(json_array_get(json_object_get(info, "ranks"), rank), name);
    cr_assert(json_is_integer(value), "%s", name);
    return json_integer_value(value);
}

/* Worked by hand for the toy of qwen3_moe: 2 layers, d 64, 16 experts of 48, 4 heads and 2 kv heads of 16, 256
 * positions, a vocabulary of 96; bf16, every buffer rounded up to 256 bytes. */
Test(tool_info, plans_what_a_rank_takes)
{
    /* Router 16*64*2; an expert: gate and up 2*48*64*2, down 64*48*2. */
    const json_int_t router = 2048, expert = 12288 + 6144, layers = 2;
    /* Four norms of at most 256 bytes, qkv (4 + 2*2)*16 rows of 64, out 64 rows of 64. */
    const json_int_t attention = 4 * 256 + 128 * 64 * 2 + 64 * 64 * 2;
    const json_int_t table = 256 * 16 * 4, head = 256 + 96 * 64 * 2;
    /* Keys and values of 2 heads of 16 in both layers. */
    const json_int_t kv = 1000 * (layers * 2 * 2 * 16 * 2);
    testing_process_t process =
        testing_tool("info '" GOLDEN "qwen3_moe' --ranks 3 --max-tokens 64 --kv-tokens 1000 --memory 0.01 "
                     "--format json");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    json_t *info = json_loads(process.output, 0, NULL);
    cr_assert_eq(json_integer_value(json_object_get(info, "memory_bytes")), 10737418); /* 2^30 / 100 */
    const json_int_t count[] = {6, 5, 5};
    for (size_t r = 0; r < 3; r++) {
        cr_expect_eq(rank_number(info, r, "local_experts"), count[r]);
        cr_expect_eq(rank_number(info, r, "weight_bytes"), layers * (router + count[r] * expert), "rank %zu", r);
        cr_expect_eq(rank_number(info, r, "dense_bytes"), layers * attention + table + head);
        cr_expect_eq(rank_number(info, r, "kv_bytes"), kv);
        json_int_t total = rank_number(info, r, "weight_bytes") + rank_number(info, r, "dense_bytes") +
                           rank_number(info, r, "workspace_bytes") + rank_number(info, r, "comm_bytes") + kv;
        cr_expect_eq(rank_number(info, r, "total_bytes"), total);
        cr_expect_eq(rank_number(info, r, "left_bytes"), 10737418 - total);
        /* At least the tokens themselves: received rows and their results, from all ranks, in both layers. */
        cr_expect_geq(rank_number(info, r, "comm_bytes"), layers * 2 * 3 * 64 * 64 * 2);
        cr_expect_geq(rank_number(info, r, "workspace_bytes"), layers * 3 * 64 * 4 * 48 * 2);
    }
    testing_process_free(&process);

    /* What forward needs grows with the tokens, weights and cache do not. */
    process = testing_tool("info '" GOLDEN "qwen3_moe' --max-tokens 1 --format json");
    json_t *small = json_loads(process.output, 0, NULL);
    cr_assert(small, "%s", process.errors);
    cr_expect_eq(rank_number(small, 0, "weight_bytes"), layers * (router + 16 * expert));
    cr_expect_eq(rank_number(small, 0, "comm_bytes"), 0);
    cr_expect_eq(rank_number(small, 0, "kv_bytes"), 0);
    cr_expect_lt(rank_number(small, 0, "workspace_bytes"), rank_number(info, 0, "workspace_bytes"));
    testing_process_free(&process);
    json_decref(info);
    json_decref(small);

    process = testing_tool("info '" GOLDEN "qwen3_moe' --ranks 2 --memory 0.0001");
    cr_assert(strstr(process.output, "more tokens"), "%s", process.output);
    cr_assert(process.exit_code == 1 && strstr(process.errors, "rank 0 takes"), "%s", process.errors);
    testing_process_free(&process);

    /* Rows to be sent, of 4096 tokens for 2 peers each, are what p2p does without; rows of 64 bf16. */
    process = testing_tool("info '" GOLDEN "qwen3_moe' --ranks 3 --max-tokens 4096 --transport nccl --format json");
    json_t *nccl = json_loads(process.output, 0, NULL);
    cr_assert(nccl, "%s", process.errors);
    testing_process_free(&process);
    process = testing_tool("info '" GOLDEN "qwen3_moe' --ranks 3 --max-tokens 4096 --transport p2p --format json");
    json_t *p2p = json_loads(process.output, 0, NULL);
    cr_assert(p2p, "%s", process.errors);
    testing_process_free(&process);
    cr_expect_str_eq(json_string_value(json_object_get(nccl, "transport")), "nccl");
    cr_expect_str_eq(json_string_value(json_object_get(p2p, "transport")), "p2p");
    json_int_t less = rank_number(nccl, 0, "comm_bytes") - rank_number(p2p, 0, "comm_bytes");
    cr_expect_geq(less, layers * (4096 * 2 * 64 * 2 - (2 << 20)), "%lld", (long long)less);
    json_decref(nccl);
    json_decref(p2p);
    process = testing_tool("info '" GOLDEN "qwen3_moe' --ranks 3");
    cr_assert(strstr(process.output, "transport    mpi\n"), "%s", process.output);
    testing_process_free(&process);
    refuses("info '" GOLDEN "qwen3_moe' --ranks 33 --transport p2p", "expected 1..32 over transport p2p");
    refuses("info '" GOLDEN "qwen3_moe' --transport tcp", "--transport");
    refuses("info '" GOLDEN "qwen3_moe' --memory 0", "--memory");
    refuses("info '" GOLDEN "qwen3_moe' --kv-tokens -1", "--kv-tokens");
}
