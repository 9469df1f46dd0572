/* moe_tool check in one process: golden files that are whole, partial, changed or wrong. */
#include "tests/testing_tool.h"
#include "tools/tool_check.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the tests take and give back all at once: copies of tensors, and parsed lines. */
static char pool[1 << 20];
static size_t pool_used;
static json_t *parsed;

static void *take(const void *from, size_t bytes)
{
    size_t at = (pool_used + 15) / 16 * 16;
    cr_assert(at + bytes <= sizeof pool);
    pool_used = at + bytes;
    return memcpy(pool + at, from, bytes);
}

static void set_up(void)
{
    testing_folder_make();
    pool_used = 0;
    parsed = json_array();
}

static void tear_down(void)
{
    json_decref(parsed);
    testing_folder_remove();
}

TestSuite(tool_check, .init = set_up, .fini = tear_down, .timeout = 300);

#define GOLDEN EPMOE_TEST_DATA "/golden/"

/* The tensors of a family's golden file, as copies that a test may change and leave out. */
#define MAX_TENSORS 64
typedef struct file_t {
    safetensors_output_t tensors[MAX_TENSORS];
    int32_t count;
} file_t;

static file_t read_golden(const char *family)
{
    file_t file = {.count = 0};
    char path[512];
    epmoei_safetensors_t *source;
    snprintf(path, sizeof path, GOLDEN "%s/golden.safetensors", family);
    cr_assert_eq(epmoei_safetensors_open(path, &source), EPMOE_OK, "%s", epmoe_last_error());
    for (int64_t i = 0; i < epmoei_safetensors_count(source); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(source, i);
        safetensors_output_t *copy = &file.tensors[file.count++];
        *copy = (safetensors_output_t){.dtype = tensor->dtype, .num_dims = tensor->num_dims};
        memcpy(copy->shape, tensor->shape, sizeof copy->shape);
        copy->name = take(tensor->name, strlen(tensor->name) + 1);
        copy->data = take(tensor->data, (size_t)tensor->bytes);
    }
    epmoei_safetensors_close(source);
    return file;
}

static safetensors_output_t *tensor(file_t *file, const char *name)
{
    for (int32_t i = 0; i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name)) return &file->tensors[i];
    cr_assert_fail("no tensor %s", name);
    return NULL;
}

static float *floats(file_t *file, const char *name) { return (float *)(uintptr_t)tensor(file, name)->data; }
static int64_t *ids(file_t *file, const char *name) { return (int64_t *)(uintptr_t)tensor(file, name)->data; }

/* Keeps the tensors whose name ends in one of these. */
static void keep(file_t *file, const char *a, const char *b)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < file->count; i++) {
        const char *name = file->tensors[i].name;
        if ((strlen(name) > strlen(a) && !strcmp(name + strlen(name) - strlen(a), a)) ||
            (strlen(name) > strlen(b) && !strcmp(name + strlen(name) - strlen(b), b)))
            file->tensors[kept++] = file->tensors[i];
    }
    file->count = kept;
}

static void write_changed(const file_t *file) { testing_write("changed", file->tensors, file->count); }

static testing_process_t check(const char *family, const char *options)
{
    return testing_tool("check '" GOLDEN "%s' --golden changed.safetensors --format json %s", family, options);
}

/* The field of an item's line, NULL when no line has that item; lives as long as the test. */
static json_t *field(const testing_process_t *process, const char *item, const char *name)
{
    json_t *value = NULL;
    char *copy = strdup(process->output), *rest = NULL;
    for (char *line = strtok_r(copy, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *object = json_loads(line, 0, NULL);
        cr_assert(json_is_object(object), "no JSON object: %s", line);
        json_array_append_new(parsed, object);
        if (!strcmp(json_string_value(json_object_get(object, "item")), item)) value = json_object_get(object, name);
    }
    free(copy);
    return value;
}

static int lines(const char *text)
{
    int count = 0;
    for (; *text; text++) count += *text == '\n';
    return count;
}

static void expect_item(const testing_process_t *process, const char *item, bool ids_equal, bool ok)
{
    cr_assert_eq(json_is_true(field(process, item, "ids_equal")), ids_equal, "%s: %s", item, process->output);
    cr_assert_eq(json_is_true(field(process, item, "ok")), ok, "%s: %s", item, process->output);
    cr_assert(json_is_boolean(field(process, item, "ok")), "%s: %s", item, process->output);
    if (!ok) cr_assert(strstr(process->errors, item) != NULL, "stderr does not name %s: %s", item, process->errors);
}

static void expect_failure(testing_process_t *process, int code, const char *needle)
{
    cr_assert_eq(process->exit_code, code, "exit %d: %s", process->exit_code, process->errors);
    cr_assert(strstr(process->errors, needle) != NULL, "stderr lacks '%s': %s", needle, process->errors);
    cr_assert_str_empty(process->output);
    testing_process_free(process);
}

Test(tool_check, whole_file)
{
    file_t file = read_golden("deepseek_v3");
    write_changed(&file);
    testing_process_t process = check("deepseek_v3", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    /* A dense MLP, a router and a MoE block; two decoder layers, the second also chained; the logits, twice. */
    cr_assert_eq(lines(process.output), 8);
    expect_item(&process, "layers.0.moe", true, true);
    expect_item(&process, "layers.1.router", true, true);
    expect_item(&process, "layers.1.moe", true, true);
    cr_assert(json_real_value(field(&process, "layers.1.moe", "rel_err")) < 2e-6);
    cr_assert(json_real_value(field(&process, "layers.1.moe", "max_abs")) > 0);
    static const char *const whole[] = {"layers.0", "layers.1", "layers.1.chained", "logits", "logits.chained"};
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        expect_item(&process, whole[i], true, true);
        cr_assert(json_real_value(field(&process, whole[i], "rel_err")) < 3e-6);
        cr_assert(json_real_value(field(&process, whole[i], "max_abs")) > 0);
    }
    cr_assert_str_empty(process.errors);
    testing_process_free(&process);

    process = check("deepseek_v3", "--layer 0 --dtype bf16");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 2); /* no logits: they are not of this layer */
    expect_item(&process, "layers.0", true, true);
    expect_item(&process, "layers.0.moe", true, true);
    double rounded = json_real_value(field(&process, "layers.0.moe", "rel_err"));
    cr_assert(rounded > 1e-4 && rounded < 1e-2, "rel_err %g", rounded); /* bf16 was really used */
    testing_process_free(&process);

    process = testing_tool("check '" GOLDEN "deepseek_v3' --tol 2e-6"); /* the folder's own golden file, a table */
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 9);
    cr_assert(strstr(process.output, "layers.1.router"));
    testing_process_free(&process);
}

/* A terminal sees which layer is loaded, and nothing of it stays; a file sees nothing. */
Test(tool_check, progress_on_a_terminal)
{
    testing_terminal_t terminal = testing_terminal_open();
    testing_process_t seen = testing_tool("check '" GOLDEN "deepseek_v3' 2>%s", terminal.name);
    char *text = testing_terminal_close(&terminal);
    const size_t length = strlen(text);
    cr_expect_eq(seen.exit_code, 0, "exit %d: %s", seen.exit_code, text);
    cr_expect(!strchr(seen.output, '\r') && !strchr(seen.output, '\033'));
    cr_expect(strstr(text, "\r\033[Klayer 1: loading weights ...\r\033[Klayer 1: loading weights: "), "%s", text);
    cr_expect(strstr(text, "\r\033[Kdecoder layer 1: loading weights: "), "%s", text);
    cr_expect(strstr(text, "\r\033[Kloading the head ...\r\033[K"), "%s", text);
    cr_expect(length > 4 && !strcmp(text + length - 4, "\r\033[K"), "the last line stays: %s", text);
    free(text);
    testing_process_t unseen = testing_tool("check '" GOLDEN "deepseek_v3'");
    cr_expect_str_empty(unseen.errors);
    cr_expect_str_eq(unseen.output, seen.output);
    testing_process_free(&seen), testing_process_free(&unseen);
}

/* Every family and format with all of its tensors off their alignment, as a header of odd length leaves them: the same
 * digits. */
Test(tool_check, tensors_at_odd_addresses)
{
    static const char *const names[] = {"mixtral",
                                        "qwen2_moe",
                                        "qwen3_moe",
                                        "deepseek_v2",
                                        "deepseek_v3",
                                        "glm4_moe",
                                        "gpt_oss",
                                        "deepseek_v3_ct_w4",
                                        "deepseek_v3_fp8",
                                        "deepseek_v3_gptq_actorder",
                                        "deepseek_v3_gptq_asym_v1",
                                        "gpt_oss_mxfp4",
                                        "qwen3_moe_awq",
                                        "qwen3_moe_fp8",
                                        "qwen3_moe_gptq",
                                        "qwen3_moe_gptq_v2_g128"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char file[128];
        testing_process_t copied = testing_run(60, "cp -r '" GOLDEN "%s' '%s'", names[i], testing_path(""));
        cr_assert_eq(copied.exit_code, 0, "%s", copied.errors);
        testing_process_t aligned = testing_tool("check %s --backend cpu --format json", names[i]);
        snprintf(file, sizeof file, "%s/model", names[i]);
        testing_shift(file, 1);
        snprintf(file, sizeof file, "%s/golden", names[i]);
        testing_shift(file, 3);
        testing_process_t odd = testing_tool("check %s --backend cpu --format json", names[i]);
        cr_expect(aligned.exit_code == 0 && odd.exit_code == 0, "%s: %s%s", names[i], aligned.errors, odd.errors);
        cr_expect_str_eq(odd.output, aligned.output, "%s", names[i]);
        cr_expect(strstr(odd.output, ".moe\""), "%s", odd.output);
        testing_process_free(&copied), testing_process_free(&aligned), testing_process_free(&odd);
    }
}

/* FP8 codes without their scale, of every projection there is: an error that names it. */
Test(tool_check, scales_that_are_missing)
{
    static const char *const names[] = {"qwen3_moe_fp8", "deepseek_v3_fp8"};
    static const int32_t projections[] = {7, 11}; /* of an expert, a shared one, GQA and MLA */
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        testing_process_t copied = testing_run(60, "cp -r '" GOLDEN "%s' '%s'", names[i], testing_path(""));
        cr_assert_eq(copied.exit_code, 0, "%s", copied.errors);
        testing_process_free(&copied);
        char file[128], scale[128];
        snprintf(file, sizeof file, "%s/model.safetensors", names[i]);
        epmoei_safetensors_t *source;
        char path[512];
        snprintf(path, sizeof path, GOLDEN "%s/model.safetensors", names[i]);
        cr_assert_eq(epmoei_safetensors_open(path, &source), EPMOE_OK, "%s", epmoe_last_error());
        int32_t tried = 0;
        for (int64_t t = 0; t < epmoei_safetensors_count(source); t++) {
            const char *name = epmoei_safetensors_at(source, t)->name, *expert = strstr(name, "mlp.experts.");
            if (!strstr(name, ".weight_scale_inv") || (expert && !strstr(name, "mlp.experts.0."))) continue;
            /* The name in the header becomes another of the same length, and itself again. */
            snprintf(scale, sizeof scale, "%.*sxyz", (int)(strlen(name) - 3), name);
            for (int32_t back = 0; back < 2; back++) {
                testing_process_t changed = testing_run(60, "sed -i 's/\"%s\"/\"%s\"/' '%s'", back ? scale : name,
                                                        back ? name : scale, testing_path(file));
                cr_assert_eq(changed.exit_code, 0, "%s", changed.errors);
                testing_process_free(&changed);
                if (back) break;
                testing_process_t process = testing_tool("check %s --backend cpu", names[i]);
                cr_expect_eq(process.exit_code, 2, "%s: exit %d", name, process.exit_code);
                cr_expect(strstr(process.errors, name) && strstr(process.errors, "is missing"), "%s", process.errors);
                testing_process_free(&process);
            }
            tried++;
        }
        epmoei_safetensors_close(source);
        cr_expect_eq(tried, projections[i], "%s: %d", names[i], tried);
        testing_process_t whole = testing_tool("check %s --backend cpu", names[i]);
        cr_expect_eq(whole.exit_code, 0, "%s", whole.errors);
        testing_process_free(&whole);
    }
}

Test(tool_check, partial_files)
{
    file_t file = read_golden("mixtral");
    keep(&file, ".moe.in", ".moe.out0");
    write_changed(&file);
    testing_process_t process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 2);
    expect_item(&process, "layers.1.moe", true, true);
    cr_assert_str_empty(process.errors);
    testing_process_free(&process);

    file = read_golden("mixtral");
    keep(&file, ".router.in", ".router.out2");
    write_changed(&file);
    process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 2);
    expect_item(&process, "layers.0.router", true, true);
    testing_process_free(&process);

    file = read_golden("mixtral");
    keep(&file, ".moe.out0", "logits");
    write_changed(&file);
    process = check("mixtral", "");
    expect_failure(&process, 2, "nothing to check");
    file = read_golden("mixtral");
    write_changed(&file);
    process = check("mixtral", "--layer 5");
    expect_failure(&process, 2, "layer 5");
}

Test(tool_check, decoder_layers)
{
    /* Layers and logits alone: what the blocks in them chose is not recorded. */
    file_t file = read_golden("gpt_oss");
    static const char *const kept_names[] = {"layers.0.in", "layers.0.out0", "layers.1.in", "layers.1.out0", "logits"};
    for (int32_t i = 0; i < 5; i++) file.tensors[i] = *tensor(&file, kept_names[i]);
    file.count = 5;
    write_changed(&file);
    testing_process_t process = check("gpt_oss", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 5);
    testing_process_free(&process);

    /* A wrong layer is named; the others, and what is chained up to it, are judged for themselves. */
    floats(&file, "layers.1.out0")[100] += 1;
    write_changed(&file);
    process = check("gpt_oss", "");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.0", true, true);
    expect_item(&process, "layers.1", true, false);
    expect_item(&process, "layers.1.chained", true, false);
    expect_item(&process, "logits", true, false);
    expect_item(&process, "logits.chained", true, true);
    testing_process_free(&process);
    floats(&file, "layers.1.out0")[100] -= 1;
    floats(&file, "logits")[7] = NAN;
    write_changed(&file);
    process = check("gpt_oss", "--tol 1e30");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.1", true, true);
    expect_item(&process, "logits", true, false);
    testing_process_free(&process);

    /* 16 bits: nothing is chained. */
    floats(&file, "logits")[7] = 0;
    file.count = 4;
    write_changed(&file);
    process = check("gpt_oss", "--dtype bf16");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert_eq(lines(process.output), 2);
    testing_process_free(&process);

    /* The last layer's output is missing: the logits have no input. */
    file = read_golden("mixtral");
    tensor(&file, "layers.1.out0")->name = "layers.1.other";
    write_changed(&file);
    process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert(strstr(process.errors, "logits"), "%s", process.errors);
    cr_assert_null(field(&process, "logits", "ok"));
    testing_process_free(&process);

    /* Another expert than the recorded one is an error of the layer too. */
    file = read_golden("mixtral");
    int64_t *chosen = ids(&file, "layers.0.router.out2"), first = chosen[0], second = chosen[1];
    for (chosen[0] = 0; chosen[0] == first || chosen[0] == second;) chosen[0]++;
    write_changed(&file);
    process = check("mixtral", "--tol 1e30");
    expect_item(&process, "layers.0", false, false);
    expect_item(&process, "layers.1", true, true);
    testing_process_free(&process);
    tensor(&file, "layers.0.in")->shape[1] = 23;
    write_changed(&file);
    process = check("mixtral", "--layer 0");
    cr_assert_eq(process.exit_code, 2, "%s", process.errors);
    cr_assert(strstr(process.errors, "'layers.0.out0' has shape [1,24,64]: expected [23,64]"), "%s", process.errors);
    testing_process_free(&process);
}

/* The folder's own checkpoint: the golden one, its head stored as integers. */
static void write_integer_head(const char *family)
{
    static const char field_name[] = "\"lm_head.weight\":{\"dtype\":\"BF16\"";
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, GOLDEN "%s/config.json", family);
    cr_assert_eq(symlink(path, testing_path("config.json")), 0);
    snprintf(path, sizeof path, GOLDEN "%s/model.safetensors", family);
    cr_assert_eq(stat(path, &info), 0);
    char *bytes = malloc((size_t)info.st_size);
    FILE *in = fopen(path, "rb"), *out = fopen(testing_path("model.safetensors"), "wb");
    cr_assert_eq(fread(bytes, 1, (size_t)info.st_size, in), (size_t)info.st_size);
    char *at = memmem(bytes, (size_t)info.st_size, field_name, sizeof field_name - 1);
    cr_assert_not_null(at);
    memcpy(at + sizeof field_name - 1 - strlen("\"BF16\""), "\"I16\" ", strlen("\"BF16\""));
    cr_assert_eq(fwrite(bytes, 1, (size_t)info.st_size, out), (size_t)info.st_size);
    fclose(in);
    cr_assert_eq(fclose(out), 0);
    free(bytes);
}

Test(tool_check, head_that_is_not_computed)
{
    file_t file = read_golden("mixtral");
    write_changed(&file);
    write_integer_head("mixtral");
    testing_process_t process = testing_tool("check . --golden changed.safetensors --format json");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    expect_item(&process, "layers.1", true, true);
    cr_assert_null(field(&process, "logits", "ok"));
    cr_assert(strstr(process.errors, "logits (") && strstr(process.errors, "lm_head.weight is I16"), "%s",
              process.errors);
    testing_process_free(&process);
}

Test(tool_check, changed_output)
{
    file_t file = read_golden("mixtral");
    floats(&file, "layers.1.moe.out0")[77] += 0.5f;
    write_changed(&file);
    testing_process_t process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.0.moe", true, true);
    expect_item(&process, "layers.1.router", true, true);
    expect_item(&process, "layers.1.moe", true, false);
    cr_assert(fabs(json_real_value(field(&process, "layers.1.moe", "max_abs")) - 0.5) < 1e-4);
    testing_process_free(&process);
    process = check("mixtral", "--tol 0.5");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    testing_process_free(&process);

    floats(&file, "layers.1.moe.out0")[77] = NAN;
    write_changed(&file);
    process = check("mixtral", "--tol 1e30");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.1.moe", true, false);
    cr_assert(json_is_null(field(&process, "layers.1.moe", "rel_err")));
    cr_assert(json_is_null(field(&process, "layers.1.moe", "max_abs")));
    testing_process_free(&process);

    floats(&file, "layers.1.moe.out0")[77] = 0;
    floats(&file, "layers.0.moe.in")[3] = NAN; /* the router sends it somewhere; its row is NaN, and that is wrong */
    write_changed(&file);
    process = check("mixtral", "--layer 0 --tol 1e30");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.0.moe", json_is_true(field(&process, "layers.0.moe", "ids_equal")), false);
    testing_process_free(&process);
}

Test(tool_check, changed_routing)
{
    /* The order inside a row is free. */
    file_t file = read_golden("mixtral");
    int64_t *chosen = ids(&file, "layers.0.router.out2"), first = chosen[0], second = chosen[1];
    float *weights = floats(&file, "layers.0.router.out1"), first_weight = weights[0];
    chosen[0] = second, chosen[1] = first;
    weights[0] = weights[1], weights[1] = first_weight;
    write_changed(&file);
    testing_process_t process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    testing_process_free(&process);

    weights[1] += 0.1f; /* another weight: the router differs, the block does not */
    write_changed(&file);
    process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.0.router", true, false);
    expect_item(&process, "layers.0.moe", true, true);
    testing_process_free(&process);

    weights[1] -= 0.1f;
    for (chosen[0] = 0; chosen[0] == first || chosen[0] == second;) chosen[0]++; /* another expert */
    write_changed(&file);
    process = check("mixtral", "--tol 1e30");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.0.router", false, false);
    expect_item(&process, "layers.0.moe", false, false);
    expect_item(&process, "layers.1.router", true, true);
    expect_item(&process, "layers.1.moe", true, true);
    testing_process_free(&process);

    file = read_golden("mixtral");
    floats(&file, "layers.1.router.out0")[5] += 1; /* a logit */
    write_changed(&file);
    process = check("mixtral", "");
    cr_assert_eq(process.exit_code, 1);
    expect_item(&process, "layers.1.router", true, false);
    expect_item(&process, "layers.1.moe", true, true);
    testing_process_free(&process);
}

/* What check_router makes of one row: logits 1 0.5 0.4999 0 -1 -2 -3 -4, experts 0 and 1 expected, 0 and 2 chosen. */
static check_result_t near_tie(epmoe_dtype_t dtype, float third, epmoe_scoring_t scoring, int32_t groups,
                               const float *bias, bool *left_out)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.num_experts = 8;
    config.top_k = 2;
    config.dtype = dtype;
    config.scoring = scoring;
    config.n_group = groups;
    config.topk_group = groups > 1 ? 1 : groups;
    config.has_selection_bias = bias != NULL;
    float logits[] = {1, 0.5f, third, 0, -1, -2, -3, -4}, weights[] = {.6f, .4f};
    int32_t expected[] = {0, 1}, got[] = {0, 2};
    golden_values_t golden = {.num_tokens = 1, .logits = logits, .weights = weights, .ids = expected};
    check_outputs_t outputs = {.logits = logits, .weights = weights, .ids = got};
    check_result_t result;
    check_router(&config, bias, &golden, &outputs, 1, left_out, &result);
    return result;
}

Test(tool_check, near_ties)
{
    static const float zeros[8] = {0}, lifted[] = {0, 0, 0, 0, 1.7304f, 2, 0, 0};
    bool left_out;
    check_result_t result = near_tie(EPMOE_BF16, 0.4999f, EPMOE_SCORING_SOFTMAX, 1, NULL, &left_out);
    cr_assert(left_out && result.near_tie == 1 && result.ids_equal);
    cr_assert(!result.ok, "nothing was left to compare");
    result = near_tie(EPMOE_F32, 0.4999f, EPMOE_SCORING_SOFTMAX, 1, NULL, &left_out); /* never in fp32 */
    cr_assert(!left_out && result.near_tie == 0 && !result.ids_equal && !result.ok);
    near_tie(EPMOE_BF16, 0.48f, EPMOE_SCORING_SOFTMAX, 1, NULL, &left_out); /* too far */
    cr_assert(!left_out);
    /* By sigmoid 0.5 and 0.48 are 0.0047 apart. */
    near_tie(EPMOE_BF16, 0.48f, EPMOE_SCORING_SIGMOID, 1, zeros, &left_out);
    cr_assert(left_out);
    near_tie(EPMOE_BF16, 0.4f, EPMOE_SCORING_SIGMOID, 1, zeros, &left_out);
    cr_assert(!left_out);
    /* Two groups of four: the best two of the first are .73106 + .62246 = 1.35352; those of the second come to
     * .26894 + .11920 + biases. Far apart, then within 0.01. */
    near_tie(EPMOE_BF16, 0.4f, EPMOE_SCORING_SIGMOID, 2, zeros, &left_out);
    cr_assert(!left_out);
    float close[8] = {0};
    close[4] = 0.4817f, close[5] = 0.4817f;
    near_tie(EPMOE_BF16, 0.4f, EPMOE_SCORING_SIGMOID, 2, close, &left_out);
    cr_assert(left_out);
    near_tie(EPMOE_BF16, 0.4f, EPMOE_SCORING_SIGMOID, 2, lifted, &left_out);
    cr_assert(!left_out);
}

Test(tool_check, wrong_files)
{
    file_t file = read_golden("mixtral");
    safetensors_output_t *in = tensor(&file, "layers.1.moe.in");
    in->shape[1] = 12, in->shape[2] = 128;
    write_changed(&file);
    testing_process_t process = check("mixtral", "--layer 1");
    expect_failure(&process, 2, "'layers.1.moe.in' has shape [1,12,128]: expected [T,64]");
    in->shape[1] = 23, in->shape[2] = 64;
    write_changed(&file);
    process = check("mixtral", "--layer 1");
    expect_failure(&process, 2, "'layers.1.moe.out0' has shape [1,24,64]: expected [23,64]");
    in->shape[1] = 24;
    ids(&file, "layers.1.router.out2")[9] = 8;
    write_changed(&file);
    process = check("mixtral", "--layer 1");
    expect_failure(&process, 2, "layers.1.router.out2");
    ids(&file, "layers.1.router.out2")[9] = 0;
    tensor(&file, "layers.1.moe.out0")->dtype = EPMOE_I32;
    write_changed(&file);
    process = check("mixtral", "--layer 1");
    expect_failure(&process, 2, "layers.1.moe.out0");
    tensor(&file, "layers.1.moe.in")->name = "layers.9.moe.in"; /* the checkpoint has two layers */
    tensor(&file, "layers.0.moe.out0")->name = "layers.9.moe.out0";
    write_changed(&file);
    process = check("mixtral", "--layer 9");
    expect_failure(&process, 2, "9");
}

Test(tool_check, wrong_arguments)
{
    file_t file = read_golden("mixtral");
    write_changed(&file);
    static const char *const bad[] = {"--tol 0",      "--tol -1",       "--tol x",      "--tol nan",
                                      "--layer -1",   "--layer x",      "--dtype int8", "--timeout 0",
                                      "--format xml", "--backend rocm", "--bogus",      "another"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        testing_process_t process = check("mixtral", bad[i]);
        expect_failure(&process, 2, strrchr(bad[i], ' ') ? strrchr(bad[i], ' ') + 1 : bad[i]);
    }
    testing_process_t process = check("mixtral", "--backend cuda");
    cr_assert_eq(strncmp(process.errors, "not supported:", 14), 0, "%s", process.errors);
    expect_failure(&process, 3, "cuda");
    process = check("none", "");
    expect_failure(&process, 2, "none");
    process = testing_tool("check");
    expect_failure(&process, 2, "DIR");
    process = testing_tool("check '" GOLDEN "mixtral' --golden none.safetensors");
    expect_failure(&process, 2, "none.safetensors");
}
