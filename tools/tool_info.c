#include "tools/tool_info.h"
#include "tools/tool_util.h"

#include "base/dtype.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INFO_TRANSPORTS "auto,mpi,nccl,p2p"

static const tool_option_t options[] = {
    {"ranks", "R", "bytes per rank for this many ranks (default 1)"},
    {"max-tokens", "N", "largest T per rank and forward (default 4096)"},
    {"kv-tokens", "N", "tokens in the KV cache of each rank (default 0)"},
    {"transport", INFO_TRANSPORTS, "of the exchange buffers; default as ranks with a device each choose"},
    {"memory", "GIB", "of each rank: says what is left, and exits with 1 where it does not fit"},
    {"format", TOOL_FORMATS, "default table"},
    {0},
};
static const char usage[] = "info DIR [--ranks R] [--max-tokens N] [--kv-tokens N] [--transport T] [--memory GIB] "
                            "[--format F]";

#define MAX_RANKS      4096
#define MAX_KV_TOKENS  ((int64_t)1 << 36)
#define MAX_MEMORY_GIB 1e6

typedef struct info_t {
    const program_t *program;
    const char *dir;
    int64_t ranks;
    int64_t max_tokens;
    int32_t format;
    epmoe_transport_t transport;

    epmoe_checkpoint_t *checkpoint;
    epmoe_checkpoint_info_t about;
    epmoe_layer_config_t *configs;   /* [num_layers] */
    const epmoe_layer_config_t *moe; /* the first MoE layer's, NULL without any */
    info_rank_t *bytes;              /* [ranks] */

    info_attention_t attention;
    info_plan_t plan;
} info_t;

static int take_memory(info_t *info, const char *value)
{
    double gib = 0;
    int code = tool_take_positive(info->program, "memory", value, &gib);
    if (code) return code;
    if (gib > MAX_MEMORY_GIB)
        return program_error_once(info->program, PROGRAM_BAD_INPUT, "--memory is '%s': expected at most %g GiB", value,
                                  MAX_MEMORY_GIB);
    info->plan.memory = epmoei_max64((int64_t)(gib * (double)(1 << 30)), 1);
    return PROGRAM_OK;
}

static int take_transport(info_t *info, const char *value)
{
    static const epmoe_transport_t transports[] = {EPMOE_TRANSPORT_AUTO, EPMOE_TRANSPORT_MPI, EPMOE_TRANSPORT_NCCL,
                                                   EPMOE_TRANSPORT_P2P};
    int32_t choice = 0;
    int code = tool_take_choice(info->program, "transport", INFO_TRANSPORTS, value, &choice);
    info->transport = transports[choice];
    return code;
}

static int take(void *ctx, const char *option, const char *value)
{
    info_t *info = ctx;
    if (!option) {
        if (info->dir)
            return program_error_once(info->program, PROGRAM_BAD_INPUT, "argument '%s' is unknown: usage: moe_tool %s",
                                      value, usage);
        info->dir = value;
        return PROGRAM_OK;
    }
    if (!strcmp(option, "ranks")) return tool_take_number(info->program, option, 1, MAX_RANKS, value, &info->ranks);
    if (!strcmp(option, "max-tokens"))
        return tool_take_number(info->program, option, 1, INT32_MAX, value, &info->max_tokens);
    if (!strcmp(option, "kv-tokens"))
        return tool_take_number(info->program, option, 0, MAX_KV_TOKENS, value, &info->plan.kv_tokens);
    if (!strcmp(option, "transport")) return take_transport(info, value);
    if (!strcmp(option, "memory")) return take_memory(info, value);
    return tool_take_choice(info->program, option, TOOL_FORMATS, value, &info->format);
}

static epmoe_status_t count_rank(const info_t *info, int32_t rank, info_rank_t *bytes)
{
    for (int32_t i = 0; i < info->about.num_layers; i++) {
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
        EPMOEI_CHECK(epmoe_layer_memory(&info->configs[i], (int32_t)info->ranks, rank, &memory));
        if (&info->configs[i] == info->moe) {
            bytes->first_expert = memory.first_expert;
            bytes->local_experts = memory.local_experts;
        }
        bytes->experts += memory.weight_bytes;
        bytes->workspace += memory.workspace_bytes;
        bytes->comm += memory.comm_bytes;
    }
    info_sum_rank(&info->plan, bytes);
    return EPMOE_OK;
}

static epmoe_status_t choose_transport(info_t *info)
{
    epmoe_backend_t backend;
    if (info->transport != EPMOE_TRANSPORT_AUTO) return EPMOE_OK;
    EPMOEI_CHECK(epmoe_backend_resolve(EPMOE_BACKEND_AUTO, &backend));
    info->transport = info->ranks == 1                ? EPMOE_TRANSPORT_LOCAL
                      : backend == EPMOE_BACKEND_CUDA ? EPMOE_TRANSPORT_NCCL
                                                      : EPMOE_TRANSPORT_MPI;
    return EPMOE_OK;
}

static epmoe_status_t gather_info(info_t *info)
{
    EPMOEI_CHECK(choose_transport(info));
    EPMOEI_CHECK(epmoe_checkpoint_open(info->dir, &info->checkpoint));
    info->about = (epmoe_checkpoint_info_t)EPMOE_CHECKPOINT_INFO_INIT;
    EPMOEI_CHECK(epmoe_checkpoint_get_info(info->checkpoint, &info->about));
    info->configs = calloc((size_t)info->about.num_layers + 1, sizeof *info->configs);
    info->bytes = calloc((size_t)info->ranks, sizeof *info->bytes);
    if (!info->configs || !info->bytes) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the layers");
    for (int32_t i = 0; i < info->about.num_layers; i++) {
        info->configs[i] = (epmoe_layer_config_t)EPMOE_LAYER_CONFIG_INIT;
        EPMOEI_CHECK(epmoe_checkpoint_layer_config(info->checkpoint, i, &info->configs[i]));
        info->configs[i].max_tokens = (int32_t)info->max_tokens;
        info->configs[i].transport = info->transport;
        if (info->configs[i].num_experts && !info->moe) info->moe = &info->configs[i];
    }
    EPMOEI_CHECK(info_attention_gather(info->checkpoint, &info->attention));
    EPMOEI_CHECK(info_plan_gather(info->checkpoint, &info->attention, (int32_t)info->max_tokens, &info->plan));
    for (int32_t r = 0; r < info->ranks; r++) EPMOEI_CHECK(count_rank(info, r, &info->bytes[r]));
    return EPMOE_OK;
}

/* --------------------------------------------------------------------------------------------------------- output */

static const char *scoring_name(epmoe_scoring_t scoring)
{
    static const char *const names[] = {"softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "sparse_mixer"};
    return names[scoring];
}

static const char *activation_name(epmoe_activation_t activation)
{
    static const char *const names[] = {"silu", "gelu", "gelu_tanh", "swiglu_oai", "none"};
    return names[activation];
}

static const char *group_score_name(epmoe_group_score_t score)
{
    return score == EPMOE_GROUP_SCORE_MAX ? "max" : "top2";
}

static float scale_of(const epmoe_layer_config_t *config)
{
    return config->routed_scale != 0 ? config->routed_scale : 1;
}
static int32_t groups_of(const epmoe_layer_config_t *config) { return config->n_group > 0 ? config->n_group : 1; }
static int32_t taken_groups_of(const epmoe_layer_config_t *config)
{
    return config->topk_group > 0 ? config->topk_group : groups_of(config);
}

/* As stored; where the loader names none, as the activations. */
static const char *format_name(const epmoe_layer_config_t *config)
{
    epmoe_dtype_t dtype = config->dtype ? config->dtype : EPMOE_BF16;
    return epmoe_format_string(config->weight_format ? config->weight_format : epmoei_format_of_dtype(dtype));
}

static void print_size(const char *label, int64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++) value /= 1024;
    printf("%s%.*f %s", label, unit ? 2 : 0, value, units[unit]);
}

/* "0-3, 5": the layers that are dense, or are not. */
static void print_layers(const info_t *info, bool dense)
{
    bool any = false;
    for (int32_t i = 0; i < info->about.num_layers; i++) {
        if (!info->configs[i].num_experts != dense) continue;
        int32_t last = i;
        while (last + 1 < info->about.num_layers && !info->configs[last + 1].num_experts == dense) last++;
        printf(last > i ? "%s%d-%d" : "%s%d", any ? ", " : "", i, last);
        any = true;
        i = last;
    }
    printf(any ? "\n" : "none\n");
}

static void print_router(const epmoe_layer_config_t *moe)
{
    printf("router       %s, top %d%s", scoring_name(moe->scoring), moe->top_k,
           moe->renormalize ? ", renormalised" : "");
    if (moe->has_selection_bias) printf(", selection bias");
    if (moe->router_has_bias) printf(", bias");
    if (groups_of(moe) > 1)
        printf(", %d groups keep %d (score %s)", groups_of(moe), taken_groups_of(moe),
               group_score_name(moe->group_score));
    printf(", x%g%s\n", (double)scale_of(moe), moe->weight_on_input ? ", weight on the input" : "");
}

static void print_table(const info_t *info)
{
    const epmoe_layer_config_t *moe = info->moe;
    printf("family       %s\n", info->about.family);
    printf("layers       %d, hidden %d\n", info->about.num_layers, info->about.hidden);
    printf("moe layers   ");
    print_layers(info, false);
    printf("dense layers ");
    print_layers(info, true);
    if (moe) {
        printf("experts      %d, intermediate %d, %s%s\n", moe->num_experts, moe->intermediate,
               activation_name(moe->activation), moe->expert_has_bias ? ", biases" : "");
        print_router(moe);
        if (moe->shared_intermediate)
            printf("shared       intermediate %d%s\n", moe->shared_intermediate, moe->shared_gated ? ", gated" : "");
        printf("format       %s\n", format_name(moe));
        info_tiles_print(moe, info->bytes[0].local_experts);
    }
    info_attention_print(&info->attention);
    printf("files        %d, ", info->about.num_shards);
    print_size("", info->about.total_bytes);
    printf("\ntransport    %s\n", epmoe_transport_string(info->transport));
    info_plan_print_header(&info->plan);
    for (int32_t r = 0; r < info->ranks; r++) info_plan_print_rank(&info->plan, r, &info->bytes[r]);
    if (info->attention.refused[0]) printf("attention, KV cache and head are not counted\n");
}

static json_t *json_layers(const info_t *info, bool dense)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < info->about.num_layers; i++)
        if (!info->configs[i].num_experts == dense) json_array_append_new(list, json_integer(i));
    return list;
}

static void print_json(const info_t *info)
{
    const epmoe_layer_config_t *moe = info->moe;
    json_t *object =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:I, s:o, s:o}", "family", info->about.family, "num_layers",
                  info->about.num_layers, "hidden", info->about.hidden, "num_experts", info->about.num_experts,
                  "num_shards", info->about.num_shards, "total_bytes", (json_int_t)info->about.total_bytes,
                  "moe_layers", json_layers(info, false), "dense_layers", json_layers(info, true));
    if (moe) {
        json_t *router = json_pack("{s:s, s:b, s:f, s:i, s:i, s:s, s:b, s:b, s:b}", "scoring",
                                   scoring_name(moe->scoring), "renormalize", moe->renormalize, "scale",
                                   (double)scale_of(moe), "n_group", groups_of(moe), "topk_group", taken_groups_of(moe),
                                   "group_score", group_score_name(moe->group_score), "bias", moe->router_has_bias,
                                   "selection_bias", moe->has_selection_bias, "weight_on_input", moe->weight_on_input);
        json_t *rest = json_pack("{s:i, s:i, s:s, s:b, s:i, s:b, s:s, s:o}", "top_k", moe->top_k, "intermediate",
                                 moe->intermediate, "activation", activation_name(moe->activation), "expert_bias",
                                 moe->expert_has_bias, "shared_intermediate", moe->shared_intermediate, "shared_gated",
                                 moe->shared_gated, "format", format_name(moe), "router", router);
        json_object_set_new(rest, "tiles", info_tiles_json(moe, info->bytes[0].local_experts));
        json_object_update(object, rest);
        json_decref(rest);
    }
    json_t *ranks = json_array();
    for (int32_t r = 0; r < info->ranks; r++)
        json_array_append_new(ranks, info_plan_json_rank(&info->plan, r, &info->bytes[r]));
    json_object_set_new(object, "attention", info_attention_json(&info->attention));
    json_object_set_new(object, "max_tokens", json_integer(info->max_tokens));
    json_object_set_new(object, "transport", json_string(epmoe_transport_string(info->transport)));
    json_object_set_new(object, "kv_tokens", json_integer(info->plan.kv_tokens));
    if (info->plan.memory) json_object_set_new(object, "memory_bytes", json_integer(info->plan.memory));
    json_object_set_new(object, "ranks", ranks);
    char *text = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (text) puts(text);
    free(text);
    json_decref(object);
}

/* A plan that does not fit is a failure, so that a script may ask. */
static int report_fit(const info_t *info)
{
    if (!info->plan.memory) return PROGRAM_OK;
    for (int32_t r = 0; r < info->ranks; r++)
        if (info->bytes[r].left < 0)
            return program_error_once(info->program, PROGRAM_FAILED, "rank %d takes %lld bytes of %lld", r,
                                      (long long)info->bytes[r].total, (long long)info->plan.memory);
    return PROGRAM_OK;
}

int tool_info(program_t *program, int argc, char **argv)
{
    info_t info = {.program = program, .ranks = 1, .max_tokens = 4096};
    int code = tool_parse(program, argc, argv, options, take, &info);
    if (code == TOOL_HELP) {
        tool_print_help(program, usage, options);
        return PROGRAM_OK;
    }
    if (!code && !info.dir)
        code = program_error_once(program, PROGRAM_BAD_INPUT, "DIR is missing: usage: moe_tool %s", usage);
    if (code) return code;
    code = program_report(program, gather_info(&info));
    if (!code && info.format == TOOL_FORMAT_JSON)
        print_json(&info);
    else if (!code)
        print_table(&info);
    if (!code) code = report_fit(&info);
    free(info.configs);
    free(info.bytes);
    epmoe_checkpoint_close(info.checkpoint);
    return code;
}
