/* moe_tool under mpirun: the golden checkpoints at several rank counts, and errors that reach every rank. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(mpi_check, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 600);

#define GOLDEN EPMOE_TEST_DATA "/golden/"
#define TOOL   EPMOE_TEST_BIN "/moe_tool"

typedef struct family_t {
    const char *family;
    int items;        /* a router and a block per MoE layer, a block per dense layer */
    int decoder_f32;  /* decoder layers and logits, each but the first layer chained too */
    int decoder_bf16; /* without chains */
} family_t;
static const family_t families[] = {{"mixtral", 4, 5, 3},     {"qwen2_moe", 4, 5, 3},   {"qwen3_moe", 4, 5, 3},
                                    {"deepseek_v2", 4, 5, 3}, {"deepseek_v3", 3, 5, 3}, {"glm4_moe", 3, 5, 3},
                                    {"gpt_oss", 4, 5, 3}},
                      /* One layer each; those in FP8 quantise attention too. */
    quantised[] = {{"deepseek_v3_ct_w4", 2, 3, 2},
                   {"deepseek_v3_fp8", 2, 3, 2},
                   {"deepseek_v3_gptq_actorder", 2, 3, 2},
                   {"deepseek_v3_gptq_asym_v1", 2, 3, 2},
                   {"gpt_oss_mxfp4", 2, 3, 2},
                   {"qwen3_moe_awq", 2, 3, 2},
                   {"qwen3_moe_fp8", 2, 3, 2},
                   {"qwen3_moe_gptq", 2, 3, 2},
                   {"qwen3_moe_gptq_v2_g128", 2, 3, 2}};

/* Of MoE blocks and routers, and of whole decoder layers and logits, which round many more times. */
typedef struct tolerances_t {
    double block;
    double decoder;
} tolerances_t;

/* Every line of stdout is an item that is right. Returns their number. */
static int count_right(const testing_process_t *process, tolerances_t tolerances)
{
    int count = 0;
    char *copy = strdup(process->output), *rest = NULL;
    for (char *line = strtok_r(copy, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), count++) {
        json_t *item = json_loads(line, 0, NULL);
        cr_assert(json_is_object(item), "no JSON object: %s", line);
        cr_assert(json_is_true(json_object_get(item, "ids_equal")), "%s", line);
        cr_assert(json_is_true(json_object_get(item, "ok")), "%s", line);
        const char *name = json_string_value(json_object_get(item, "item"));
        bool block = name && (strstr(name, ".moe") || strstr(name, ".router"));
        double tolerance = block ? tolerances.block : tolerances.decoder;
        json_t *error = json_object_get(item, "rel_err");
        cr_assert(json_is_real(error) && json_real_value(error) <= tolerance, "%s", line);
        cr_assert_null(json_object_get(item, "near_tie"), "%s", line);
        json_decref(item);
    }
    free(copy);
    return count;
}

static void check_each(const family_t *checked, size_t count, int32_t ranks)
{
    static const struct {
        const char *options;
        tolerances_t tolerance;
    } runs[] = {{"--tol 3e-6", {2e-6, 3e-6}}, {"--dtype bf16", {1e-2, 2e-2}}};
    for (size_t f = 0; f < count; f++)
        for (int r = 0; r < 2; r++) {
            testing_process_t process = testing_run(120, "%s " TOOL " check '" GOLDEN "%s' --format json %s",
                                                    testing_mpirun(ranks), checked[f].family, runs[r].options);
            cr_assert_eq(process.exit_code, 0, "%s, %d ranks, %s: exit %d: %s", checked[f].family, ranks,
                         runs[r].options, process.exit_code, process.errors);
            int items = count_right(&process, runs[r].tolerance);
            int expected = checked[f].items + (r == 0 ? checked[f].decoder_f32 : checked[f].decoder_bf16);
            cr_assert_eq(items, expected, "%s, %d ranks: %d items: %s", checked[f].family, ranks, items,
                         process.output);
            testing_process_free(&process);
        }
}

static void check_all(int32_t ranks) { check_each(families, sizeof families / sizeof families[0], ranks); }

Test(mpi_check, quantised_one_rank) { check_each(quantised, sizeof quantised / sizeof quantised[0], 1); }
Test(mpi_check, quantised_two_ranks) { check_each(quantised, sizeof quantised / sizeof quantised[0], 2); }
/* Ranks without an expert among them. */
Test(mpi_check, quantised_five_ranks) { check_each(quantised, 3, 5); }

/* The MoE block is off by what three bits of mantissa are, alike on one rank and on two; the rest is as it was. */
Test(mpi_check, fp8_on_the_wire)
{
    double errors[2] = {0, 0};
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        testing_process_t process = testing_run(
            120, "%s " TOOL " check '" GOLDEN "deepseek_v3' --format json --layer 1 --wire fp8", testing_mpirun(ranks));
        cr_assert_eq(process.exit_code, 0, "%d ranks: exit %d: %s", ranks, process.exit_code, process.errors);
        cr_assert_gt(count_right(&process, (tolerances_t){6e-2, 6e-2}), 1);
        const char *block = strstr(process.output, "\"layers.1.moe\""),
                   *error = block ? strstr(block, "rel_err") : NULL;
        cr_assert(error && sscanf(error, "rel_err\":%lf", &errors[ranks - 1]) == 1, "%s", process.output);
        testing_process_free(&process);
    }
    cr_expect(errors[0] > 1e-2, "%g", errors[0]);
    cr_expect_float_eq(errors[0], errors[1], 1e-5);
}

/* What FP8 takes from a row of one layer decides which experts the next one chooses: no chains. */
Test(mpi_check, fp8_on_the_wire_of_every_family)
{
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        testing_process_t process = testing_run(120, "%s " TOOL " check '" GOLDEN "%s' --format json --wire fp8",
                                                testing_mpirun(2), families[f].family);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", families[f].family, process.exit_code, process.errors);
        cr_assert_eq(count_right(&process, (tolerances_t){6e-2, 6e-2}), families[f].items + families[f].decoder_bf16,
                     "%s: %s", families[f].family, process.output);
        testing_process_free(&process);
    }
}

/* Ranks have one thread each: a workspace without room for the quantised x has none of another thread's to take. */
Test(mpi_check, fp8_activations)
{
    static const char *const checked[] = {"qwen3_moe_fp8", "deepseek_v3_fp8"}; /* the latter with a shared expert */
    for (size_t f = 0; f < sizeof checked / sizeof checked[0]; f++)
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            testing_process_t process =
                testing_run(120, "%s " TOOL " check '" GOLDEN "%s' --format json --dtype fp32 --act fp8",
                            testing_mpirun(ranks), checked[f]);
            cr_assert_eq(process.exit_code, 0, "%s, %d ranks: exit %d: %s", checked[f], ranks, process.exit_code,
                         process.errors);
            cr_assert_eq(count_right(&process, (tolerances_t){8e-2, 8e-2}), 4, "%s: %s", checked[f], process.output);
            const char *block = strstr(process.output, ".moe\""), *error = block ? strstr(block, "rel_err") : NULL;
            double least = 0;
            cr_assert(error && sscanf(error, "rel_err\":%lf", &least) == 1 && least > 1e-2, "%s", process.output);
            testing_process_free(&process);
        }
}

Test(mpi_check, one_rank) { check_all(1); }
Test(mpi_check, two_ranks) { check_all(2); }
Test(mpi_check, three_ranks) { check_all(3); }
Test(mpi_check, four_ranks) { check_all(4); }
Test(mpi_check, eight_ranks) { check_all(8); }

/* By name; MPI also with one rank, which needs nothing carried. What the CPU backend lacks the communicator refuses, on
 * every rank and before anything is computed. */
Test(mpi_check, transports)
{
    static const char *const checked[] = {"deepseek_v3_fp8", "qwen3_moe_gptq", "gpt_oss_mxfp4"};
    for (size_t f = 0; f < sizeof checked / sizeof checked[0]; f++) {
        testing_process_t process = testing_run(120, "%s " TOOL " check '" GOLDEN "%s' --format json --transport mpi",
                                                testing_mpirun(f ? 2 : 1), checked[f]);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", checked[f], process.exit_code, process.errors);
        cr_assert_eq(count_right(&process, (tolerances_t){2e-6, 3e-6}), 5, "%s: %s", checked[f], process.output);
        testing_process_free(&process);
    }
    for (int p = 0; p < 2; p++) {
        testing_process_t process =
            testing_run(60, "%s " TOOL " check '" GOLDEN "mixtral' --backend cpu --transport %s", testing_mpirun(2),
                        p ? "p2p" : "nccl");
        cr_assert_eq(process.exit_code, 3, "exit %d: %s", process.exit_code, process.errors);
        cr_assert(strstr(process.errors, p ? "p2p" : "nccl"), "%s", process.errors);
        cr_assert_str_empty(process.output);
        testing_process_free(&process);
    }
    testing_process_t process = testing_run(60, TOOL " check '" GOLDEN "mixtral' --transport local");
    cr_assert_eq(process.exit_code, 2, "exit %d: %s", process.exit_code, process.errors);
    cr_assert(strstr(process.errors, "--transport"), "%s", process.errors);
    testing_process_free(&process);
}

static int count_text(const char *text, const char *needle)
{
    int count = 0;
    for (; (text = strstr(text, needle)); text++) count++;
    return count;
}

Test(mpi_check, more_ranks_than_tokens_or_experts)
{
    testing_process_t process =
        testing_run(120, "%s " TOOL " check '" GOLDEN "mixtral' --format json --tol 2e-6", testing_mpirun(11));
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(count_right(&process, (tolerances_t){2e-6, 2e-6}), 9);
    testing_process_free(&process);
}

/* The golden file again with one value of layers.1.moe.out0 changed. */
static void write_tampered(void)
{
    epmoei_safetensors_t *source;
    cr_assert_eq(epmoei_safetensors_open(GOLDEN "deepseek_v3/golden.safetensors", &source), EPMOE_OK);
    const epmoei_tensor_t *in = epmoei_safetensors_find(source, "layers.1.moe.in");
    const epmoei_tensor_t *out = epmoei_safetensors_find(source, "layers.1.moe.out0");
    float *changed = malloc((size_t)out->bytes);
    memcpy(changed, out->data, (size_t)out->bytes);
    changed[out->num_elements - 1] += 0.01f; /* of the last token, which the last rank holds */
    TESTING_WRITE("tampered", {in->name, EPMOE_F32, 3, {in->shape[0], in->shape[1], in->shape[2]}, in->data},
                  {out->name, EPMOE_F32, 3, {out->shape[0], out->shape[1], out->shape[2]}, changed});
    free(changed);
    epmoei_safetensors_close(source);
}

Test(mpi_check, one_value_changed)
{
    write_tampered();
    testing_process_t process = testing_run(60, "%s " TOOL " check '" GOLDEN "deepseek_v3' --format json --golden %s",
                                            testing_mpirun(3), testing_path("tampered.safetensors"));
    cr_assert_eq(process.exit_code, 1, "%s", process.errors);
    cr_assert_eq(count_text(process.output, "\"item\":\"layers.1.moe\""), 1, "%s", process.output);
    cr_assert_eq(count_text(process.output, "\"ok\":false"), 1, "%s", process.output);
    cr_assert_eq(count_text(process.errors, "layers.1.moe differs"), 1, "%s", process.errors);
    testing_process_free(&process);
}

Test(mpi_check, one_rank_has_no_golden_file)
{
    testing_process_t process = testing_run(
        60,
        "%s sh -c 'f=%s; [ $OMPI_COMM_WORLD_RANK = 1 ] && f=/none.safetensors; exec %s check %smixtral --golden $f'",
        testing_mpirun(3), GOLDEN "mixtral/golden.safetensors", TOOL, GOLDEN);
    cr_assert_eq(process.exit_code, 2, "exit %d: %s", process.exit_code, process.errors);
    cr_assert_str_empty(process.output);
    for (int r = 0; r < 3; r++) {
        char rank[16];
        snprintf(rank, sizeof rank, "[rank %d]", r);
        cr_assert_eq(count_text(process.errors, rank), 1, "%s: %s", rank, process.errors);
    }
    cr_assert(strstr(process.errors, "/none.safetensors"), "%s", process.errors);
    testing_process_free(&process);
}

Test(mpi_check, a_rank_that_never_comes)
{
    /* Rank 1 runs a command that makes no communicator, and then waits in MPI's end. */
    testing_process_t process =
        testing_run(60,
                    "%s sh -c 'c=check; t=\"--timeout 2\"; [ $OMPI_COMM_WORLD_RANK = 1 ] && c=info t=; exec %s $c "
                    "%smixtral $t'",
                    testing_mpirun(2), TOOL, GOLDEN);
    cr_assert(!process.timed_out);
    cr_assert_neq(process.exit_code, 0);
    cr_assert_lt(process.seconds, 15);
    cr_assert(strstr(process.errors, "[rank 0]"), "%s", process.errors);
    cr_assert_str_empty(process.output);
    testing_process_free(&process);
}

Test(mpi_check, wrong_arguments)
{
    testing_process_t process = testing_run(60, "%s " TOOL " check '" GOLDEN "mixtral' --tol x", testing_mpirun(3));
    cr_assert_eq(process.exit_code, 2, "%s", process.errors);
    cr_assert_eq(count_text(process.errors, "--tol"), 1, "%s", process.errors); /* rank 0 alone says so */
    testing_process_free(&process);

    process = testing_run(60, "%s " TOOL " check '" GOLDEN "mixtral' --backend cuda", testing_mpirun(2));
    cr_assert_eq(process.exit_code, 3, "%s", process.errors);
    cr_assert_eq(strncmp(process.errors, "not supported:", 14), 0, "%s", process.errors);
    testing_process_free(&process);

    process = testing_run(60, "PMI_SIZE=5 %s " TOOL " check '" GOLDEN "mixtral'", testing_mpirun(2));
    cr_assert_eq(process.exit_code, 2, "%s", process.errors);
    cr_assert(strstr(process.errors, "PMI_SIZE is 5 but MPI's size is 2"), "%s", process.errors);
    testing_process_free(&process);
}

Test(mpi_check, launcher_of_another_mpi)
{
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"};
    for (int i = 0; i < 3; i++) {
        testing_process_t process = testing_run(60, "%s=4 " TOOL " check '" GOLDEN "mixtral'", variables[i]);
        cr_assert_eq(process.exit_code, 2, "%s", process.errors);
        cr_assert(strstr(process.errors, "4 but MPI's size is 1"), "%s", process.errors);
        cr_assert(strstr(process.errors, variables[i]), "%s", process.errors);
        cr_assert_str_empty(process.output);
        testing_process_free(&process);
    }
    /* In an allocation, but not in a step, the number is the allocation's. */
    testing_process_t process = testing_run(60, "SLURM_NTASKS=4 SLURM_JOB_ID=7 " TOOL " check '" GOLDEN "mixtral'");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    testing_process_free(&process);
}

Test(mpi_check, commands_of_one_process)
{
    testing_process_t process =
        testing_run(60, "%s " TOOL " info '" GOLDEN "mixtral' --ranks 2 --format json", testing_mpirun(3));
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(count_text(process.output, "\n"), 1, "%s", process.output);
    testing_process_free(&process);

    const float y[] = {1, 2, 3, 4};
    TESTING_WRITE("in", {"y", EPMOE_F32, 3, {1, 2, 2}, y});
    process = testing_run(60, "cd %s && %s " TOOL " op sum --in in.safetensors --out out.safetensors", testing_path(""),
                          testing_mpirun(3));
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    float *sum = testing_read("out", "out", EPMOE_F32, 2);
    cr_assert(sum[0] == 4 && sum[1] == 6);
    free(sum);
    testing_process_free(&process);
}
