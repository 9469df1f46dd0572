/* moe_tool op when something is wrong: the exit code, what stderr names, and no output file, not even an old one. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <stdio.h>

static const float ones[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* in.safetensors of each op, right in all respects. */
static void write_topk(void)
{
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, ones}, {"bias", EPMOE_F32, 1, {4}, ones});
}

static void write_align(void)
{
    static const int32_t ids[] = {0, 1, 1, 0};
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {2, 2}, ids});
}

static void write_gemm(const int32_t *counts)
{
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, 2}, ones}, {"counts", EPMOE_I32, 1, {2}, counts},
                  {"w", EPMOE_F32, 3, {2, 3, 2}, ones});
}

static void write_experts(int64_t id)
{
    int64_t ids[] = {0, id};
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, ones}, {"ids", EPMOE_I64, 2, {1, 2}, ids},
                  {"weights", EPMOE_F32, 2, {1, 2}, ones}, {"w13", EPMOE_F32, 3, {2, 2, 2}, ones},
                  {"w2", EPMOE_F32, 3, {2, 2, 1}, ones});
}

static void set_up(void)
{
    testing_folder_make();
    write_topk();
}

TestSuite(tool_op_errors, .init = set_up, .fini = testing_folder_remove, .timeout = 300);

static void put_old_output(void) { TESTING_WRITE("out", {"old", EPMOE_F32, 1, {2}, ones}); }

/* `needles` are separated by '|'; all must be in stderr. */
static void check(testing_process_t *process, const char *what, int code, const char *needles)
{
    cr_assert_eq(process->exit_code, code, "%s: exit %d, expected %d: %s", what, process->exit_code, code,
                 process->errors);
    cr_assert_str_empty(process->output);
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", needles);
    for (char *needle = strtok_r(copy, "|", &rest); needle; needle = strtok_r(NULL, "|", &rest))
        cr_assert(strstr(process->errors, needle) != NULL, "%s: stderr lacks '%s': %s", what, needle, process->errors);
    if (code == 3)
        cr_assert_eq(strncmp(process->errors, "not supported:", 14), 0, "%s: stderr begins otherwise: %s", what,
                     process->errors);
    testing_process_free(process);
}

static void fails(const char *op, const char *settings, int code, const char *needles)
{
    put_old_output();
    testing_process_t process = testing_tool("op %s --in in.safetensors --out out.safetensors %s", op, settings);
    check(&process, settings, code, needles);
    cr_assert(!testing_exists("out.safetensors"), "op %s %s: the output file is there", op, settings);
}

Test(tool_op_errors, ops)
{
    fails("topq", "--set k=2", 2, "topq|topk|grouped_gemm|experts|silu_and_mul|spec_verify|dequant");
    fails("topk", "--set k=2 --backend cuda", 3, "cuda");
    fails("topk", "--set k=2 --backend rocm", 2, "rocm|auto,cpu,cuda");
}

Test(tool_op_errors, keys)
{
    fails("topk", "", 2, "'k' is missing");
    fails("topk", "--set k=2 top_k=2", 2, "'top_k'|scoring|renormalize|n_group|group_score");
    fails("sum", "--set k=2", 2, "'k'|none");
    fails("topk", "--set k", 2, "key=value");
    fails("topk", "--set k=2 k=3", 2, "twice");
    fails("topk", "--set k=2 --set", 2, "needs a value");
    fails("topk", "--set k=2 --backend cpu scale=2", 2, "scale=2");
    static const char *const bad[] = {"k=",
                                      "k=0",
                                      "k=-1",
                                      "k=two",
                                      "k=2.0",
                                      "k=2x",
                                      "k=5",
                                      "k=33",
                                      "k=99999999999999999999",
                                      "k=2147483648",
                                      "k=2 scale=nan",
                                      "k=2 scale=inf",
                                      "k=2 scale=0",
                                      "k=2 scale=1e39",
                                      "k=2 scale=",
                                      "k=2 n_group=0",
                                      "k=2 n_group=3",
                                      "k=2 n_group=2 topk_group=3",
                                      "k=2 n_group=2 topk_group=0"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char settings[128];
        snprintf(settings, sizeof settings, "--set %s", bad[i]);
        fails("topk", settings, 2, "expected");
    }
    fails("topk", "--set k=3 n_group=2 topk_group=1", 2, "3|2 experts");
    fails("topk", "--set k=2 renormalize=true", 2, "renormalize|'true'|0,1");
    fails("topk", "--set k=2 renormalize=2", 2, "renormalize");
    fails("topk", "--set k=2 scoring=relu", 2, "relu|softmax,sigmoid,sqrtsoftplus,topk_softmax");
    fails("topk", "--set k=2 group_score=sum", 2, "top2,max");
}

Test(tool_op_errors, tensors)
{
    TESTING_WRITE("in", {"bias", EPMOE_F32, 1, {4}, ones});
    fails("topk", "--set k=2", 2, "'logits' is missing");
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, ones}, {"biases", EPMOE_F32, 1, {4}, ones});
    fails("topk", "--set k=2", 2, "'biases'|logits|bias (optional)");
    TESTING_WRITE("in", {"logits", EPMOE_I32, 2, {2, 4}, ones});
    fails("topk", "--set k=2", 2, "'logits'|I32|F32, BF16 or F16");
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, ones}, {"bias", EPMOE_BF16, 1, {4}, ones});
    fails("topk", "--set k=2", 2, "'bias'|BF16|expected F32");
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, ones}, {"bias", EPMOE_F32, 1, {5}, ones});
    fails("topk", "--set k=2", 2, "'bias'|[5]|E=4");
    TESTING_WRITE("in", {"logits", EPMOE_F32, 3, {1, 2, 4}, ones});
    fails("topk", "--set k=2", 2, "'logits'|[1,2,4]|[T,E]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, 3}, ones});
    fails("silu_and_mul", "", 2, "'x'|[2,3]|[T,2d]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, 2}, ones}, {"counts", EPMOE_I32, 1, {2}, ones},
                  {"w", EPMOE_F32, 3, {2, 3, 4}, ones});
    fails("grouped_gemm", "", 2, "'w'|[2,3,4]|[E=2,N,K=2]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, 2}, ones}, {"counts", EPMOE_I32, 1, {2}, ones},
                  {"w", EPMOE_F32, 3, {2, 3, 2}, ones}, {"weight", EPMOE_F32, 3, {2, 3, 2}, ones});
    fails("grouped_gemm", "", 2, "'w'|'weight'");
}

Test(tool_op_errors, align)
{
    static const int32_t high[] = {0, 1, 2, 0}, low[] = {0, 1, -2, 0}, map[] = {0, -2};
    write_align();
    fails("align", "", 2, "'num_experts' is missing");
    fails("align", "--set num_experts=4097", 2, "4097|4096");
    fails("align", "--set num_experts=2 block=0", 2, "block");
    fails("align", "--set num_experts=4096 block=1048576", 2, "expected");
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {2, 2}, high});
    fails("align", "--set num_experts=2", 2, "2");
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {2, 2}, low});
    fails("align", "--set num_experts=2", 2, "-2");
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {1, 2}, high}, {"expert_map", EPMOE_I32, 1, {2}, map});
    fails("align", "--set num_experts=2", 2, "-2");
    fails("align", "--set num_experts=3", 2, "'expert_map'|[2]|E=3");
}

Test(tool_op_errors, grouped_gemm)
{
    static const int32_t fine[] = {1, 1}, negative[] = {2, -1}, more[] = {2, 1}, wrap[] = {INT32_MAX, INT32_MAX};
    write_gemm(negative);
    fails("grouped_gemm", "", 2, "counts[1]|-1");
    write_gemm(more);
    fails("grouped_gemm", "", 2, "counts|3|2 rows");
    write_gemm(wrap);
    fails("grouped_gemm", "", 2, "counts");
    write_gemm(fine);
    fails("grouped_gemm", "--set format=bf16", 2, "'w'|fp32|bf16");
    fails("grouped_gemm", "--set format=int3", 2, "bf16,fp16,fp32,fp8_block,gptq,awq,ct,mxfp4");
    fails("grouped_gemm", "--set act=fp8", 2, "act");
    fails("grouped_gemm", "--set group=0", 2, "group");
    fails("grouped_gemm", "--set zero_convention=v3", 2, "v1,v2");
    fails("grouped_gemm", "--set format=fp8_block", 2, "'w'|fp32|fp8_block");
    fails("grouped_gemm", "--set format=gptq", 2, "'qweight' is missing|gptq");
    fails("grouped_gemm", "--set format=ct", 2, "'weight_packed' is missing|ct");
    fails("grouped_gemm", "--set format=mxfp4", 2, "'blocks' is missing|mxfp4");
    fails("grouped_gemm", "--set format=gptq act=fp8", 2, "act|fp8_block");
}

Test(tool_op_errors, experts)
{
    static const int64_t bad[] = {2, -2, INT64_C(4294967296)}; /* the last one is 0 in 32 bits */
    for (int i = 0; i < 3; i++) {
        char id[32];
        snprintf(id, sizeof id, "%lld", (long long)bad[i]);
        write_experts(bad[i]);
        fails("experts", "", 2, id);
    }
    write_experts(1);
    fails("experts", "--set activation=relu", 2, "silu,gelu,gelu_tanh,swiglu_oai");
    fails("experts", "--set limit=0", 2, "limit");
    fails("experts", "--set limit=-1", 2, "limit");
    fails("experts", "--set alpha=0", 2, "alpha");
    testing_process_t process = testing_tool("op experts --in in.safetensors --out out.safetensors");
    check(&process, "the right one", 0, "");
}

Test(tool_op_errors, files)
{
    put_old_output();
    testing_process_t process = testing_tool("op topk --in none.safetensors --out out.safetensors --set k=2");
    check(&process, "no input", 2, "none.safetensors");
    cr_assert(!testing_exists("out.safetensors"));

    put_old_output();
    process = testing_run(10, "printf 'no tensors here' > '%s'", testing_path("text"));
    testing_process_free(&process);
    process = testing_tool("op topk --in text --out out.safetensors --set k=2");
    check(&process, "text", 2, "text");
    cr_assert(!testing_exists("out.safetensors"));

    process = testing_tool("op topk --in in.safetensors --out none/out.safetensors --set k=2");
    check(&process, "no folder", 2, "none/out.safetensors");
    /* What is no regular file is never removed or replaced. */
    process = testing_tool("op topk --in in.safetensors --out . --set k=2");
    check(&process, "a folder", 2, "regular file");
    process = testing_tool("op topk --in in.safetensors --out /dev/null --set k=2");
    check(&process, "a device", 2, "regular file");
    process = testing_run(10, "test -c /dev/null");
    check(&process, "/dev/null", 0, "");
    process = testing_tool("op topk --in in.safetensors --out ./in.safetensors --set k=2");
    check(&process, "the input", 2, "--in");
    cr_assert(testing_exists("in.safetensors"));
}

Test(tool_op_errors, options)
{
    fails("topk", "--set k=2 --bogus", 2, "--bogus|--in|--out|--set|--backend");
    fails("topk", "--set k=2 -x", 2, "'-x'");
    fails("topk", "more --set k=2", 2, "'more'");
    put_old_output();
    testing_process_t process = testing_tool("op topk --bogus --out out.safetensors");
    check(&process, "an option before --out", 2, "--bogus");
    cr_assert(!testing_exists("out.safetensors"));
    process = testing_tool("op topk --out out.safetensors --set k=2");
    check(&process, "no --in", 2, "--in");
    process = testing_tool("op topk --in in.safetensors --set k=2");
    check(&process, "no --out", 2, "--out");
    process = testing_tool("op --in in.safetensors --out out.safetensors --set k=2");
    check(&process, "no op", 2, "NAME");
    process = testing_tool("ops");
    check(&process, "ops", 2, "'ops'|op, check or info");
    process = testing_tool(" ");
    check(&process, "nothing", 2, "usage");
    process = testing_tool("op --help");
    cr_assert_eq(process.exit_code, 0);
    cr_assert(strstr(process.output, "swiglu_oai") && strstr(process.output, "spec_verify"));
    testing_process_free(&process);
}
