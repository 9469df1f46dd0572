#include "bench/options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WIDTH (1 << 20)

enum {
    OPT_MODEL = 256,
    OPT_CHECKPOINT,
    OPT_LAYER,
    OPT_TOKENS,
    OPT_TOKENS_PER_RANK,
    OPT_CAPACITY,
    OPT_DTYPE,
    OPT_ROUTING,
    OPT_PLACEMENT,
    OPT_BACKEND,
    OPT_TRANSPORT,
    OPT_ITERS,
    OPT_WARMUP,
    OPT_GRAPH,
    OPT_DECODER,
    OPT_CONTEXT,
    OPT_CHECK,
    OPT_ACT,
    OPT_WIRE,
    OPT_FORMAT,
    OPT_PLOT,
    OPT_SEED,
    OPT_TIMEOUT,
    OPT_OP,
    OPT_HIDDEN,
    OPT_INTERMEDIATE,
    OPT_TOP_K,
    OPT_HEADS,
    OPT_COMM_SMS,
    OPT_LIST_MODELS,
    OPT_INJECT_SLEEP,
    OPT_INJECT_NAN,
    OPT_HELP,
};

static const struct option k_options[] = {
    {"model", required_argument, NULL, OPT_MODEL},
    {"checkpoint", required_argument, NULL, OPT_CHECKPOINT},
    {"layer", required_argument, NULL, OPT_LAYER},
    {"tokens", required_argument, NULL, OPT_TOKENS},
    {"tokens-per-rank", required_argument, NULL, OPT_TOKENS_PER_RANK},
    {"capacity", required_argument, NULL, OPT_CAPACITY},
    {"dtype", required_argument, NULL, OPT_DTYPE},
    {"routing", required_argument, NULL, OPT_ROUTING},
    {"placement", required_argument, NULL, OPT_PLACEMENT},
    {"backend", required_argument, NULL, OPT_BACKEND},
    {"transport", required_argument, NULL, OPT_TRANSPORT},
    {"iters", required_argument, NULL, OPT_ITERS},
    {"warmup", required_argument, NULL, OPT_WARMUP},
    {"graph", required_argument, NULL, OPT_GRAPH},
    {"decoder", no_argument, NULL, OPT_DECODER},
    {"context", required_argument, NULL, OPT_CONTEXT},
    {"check", optional_argument, NULL, OPT_CHECK},
    {"act", required_argument, NULL, OPT_ACT},
    {"wire", required_argument, NULL, OPT_WIRE},
    {"format", required_argument, NULL, OPT_FORMAT},
    {"plot", required_argument, NULL, OPT_PLOT},
    {"seed", required_argument, NULL, OPT_SEED},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"op", required_argument, NULL, OPT_OP},
    {"hidden", required_argument, NULL, OPT_HIDDEN},
    {"intermediate", required_argument, NULL, OPT_INTERMEDIATE},
    {"top-k", required_argument, NULL, OPT_TOP_K},
    {"heads", required_argument, NULL, OPT_HEADS},
    {"comm-sms", required_argument, NULL, OPT_COMM_SMS},
    {"list-models", no_argument, NULL, OPT_LIST_MODELS},
    {"inject-sleep", required_argument, NULL, OPT_INJECT_SLEEP},
    {"inject-nan", no_argument, NULL, OPT_INJECT_NAN},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

static const char k_help[] =
    "moe_layer_bench: times one MoE layer, alone or with its experts spread over the ranks of an mpirun, checks it\n"
    "against a double precision reference and compares it with what the machine can do.\n"
    "\n"
    "  mpirun -np 8 ./moe_layer_bench --model qwen3-30b-a3b --tokens 1,16,64\n"
    "\n"
    "What runs\n"
    "  --model NAME             a public model's shape with random weights; default qwen3-30b-a3b\n"
    "  --checkpoint DIR         a folder of safetensors instead\n"
    "  --layer N                of the checkpoint; default the first with experts\n"
    "  --tokens T[,T...]        tokens of each rank, one case for each T; default 16\n"
    "  --tokens-per-rank A,B,.. one case, each rank its own number\n"
    "  --capacity N             most rows a rank accepts; default the worst case\n"
    "  --comm-sms N             p2p: most multiprocessors that dispatch and combine take; default all\n"
    "  --dtype D                bf16 (default), fp16, fp32; fp8, w4, mxfp4: bf16 with random experts quantised so\n"
    "  --act A                  of fp8 weights: fp8 = activations are quantised too, none; default what is faster\n"
    "  --wire W                 fp8 = rows go to the experts quantised, with one rank too; dtype (default) = as they "
    "are\n"
    "  --routing R              uniform (default), zipf:S, one-expert, file:PATH (a JSON list of k ids per line, rank "
    "by\n"
    "                           rank), router (not forced; default with --checkpoint)\n"
    "  --placement P            contiguous (default); balanced[:N]: N experts on all ranks together, copies of busy\n"
    "                           ones included (default one more on each rank), placed for the load of all cases\n"
    "  --decoder                the whole decoder layer: prefill of one sequence of T tokens on each rank\n"
    "  --context N              of --decoder: one step of T sequences on each rank instead, each N tokens long with\n"
    "                           the new one, over a paged cache of random keys and values\n"
    "  --op NAME[,NAME...]      ops on one rank, one after the other: topk, align, permute, unpermute, grouped_gemm,\n"
    "                           silu_and_mul, sum, quantize_fp8, dequant, rms_norm (with a residual),\n"
    "                           rms_norm_alone, rope, qk_norm_rope, cache_write, rope_cache_write,\n"
    "                           attention (decode), prefill, sample, spec_verify;\n"
    "                           linear: the projection to q, k and v; linear_fp8: the same in E4M3,\n"
    "                           a scale per token and row; linear_fp8_blocks: per 128 columns;\n"
    "                           rms_norm_fp8, silu_and_mul_fp8: with E4M3 output, 128 columns per scale;\n"
    "                           on CUDA router: product, topk and align as the layer does them;\n"
    "                           exchange: dispatch and combine of all ranks, over every transport they can use\n"
    "  --hidden N, --intermediate N, --top-k N, --heads Q:KV:DIM\n"
    "                           of --op: in place of the model's; silu_and_mul and sum have T times top-k rows\n"
    "How it runs\n"
    "  --backend B              auto (default), cpu, cuda\n"
    "  --transport T            auto (default), p2p, nccl, mpi\n"
    "  --iters N                timed iterations, at least 1; default 10, on CUDA 20\n"
    "  --warmup N               iterations before them; default 3, on CUDA 5\n"
    "  --graph 0|1              time the replay of a CUDA graph; default 1 on CUDA with one rank or p2p, else 0\n"
    "  --timeout S              longest wait for a peer, in seconds; default 30\n"
    "  --seed N                 of weights, inputs and routing; default 1\n"
    "What it says\n"
    "  --check[=0|1]            compare with the reference; default 1\n"
    "  --format table|json      json: one object per line and case; default table\n"
    "  --plot FILE              draws the cases against the roofline, and their stages; .svg, .pdf or .png; needs\n"
    "                           python3 with Matplotlib\n"
    "  --list-models            the models that --model knows\n"
    "  --help                   this text\n"
    "Test aids\n"
    "  --inject-sleep RANK:MS   that rank sleeps within every timed iteration\n"
    "  --inject-nan             a weight of every expert is NaN\n"
    "\n"
    "Each iteration starts with a barrier and cold caches; its time is that of the slowest rank, on CUDA between\n"
    "events around the run. The floor is the time that the weights drawn, the rows and the arithmetic need at the\n"
    "memory bandwidth and GEMM speed measured at the start. Stages are timed in runs of their own on CUDA. Wire GB/s "
    "counts the rows that the busiest rank sends to others in dispatch and combine, logical GB/s "
    "also\n"
    "those to itself, over the time of these two stages.\n"
    "Exit: 0 good, 1 wrong or failed, 2 bad input, 3 not supported.\n";

void options_print_help(void) { fputs(k_help, stdout); }

static bool parse_int64(const char *text, int64_t lo, int64_t hi, int64_t *value)
{
    char *end;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (end == text || *end || errno || parsed < lo || parsed > hi) return false;
    *value = parsed;
    return true;
}

static bool parse_int32(const char *text, int32_t lo, int32_t hi, int32_t *value)
{
    int64_t wide;
    if (!parse_int64(text, lo, hi, &wide)) return false;
    *value = (int32_t)wide;
    return true;
}

static bool parse_double(const char *text, double lo, double hi, double *value)
{
    char *end;
    double parsed = strtod(text, &end);
    if (end == text || *end || !(parsed >= lo && parsed <= hi)) return false;
    *value = parsed;
    return true;
}

static bool parse_list(const char *text, int32_t *list, int32_t *count)
{
    *count = 0;
    for (;;) {
        char *end;
        errno = 0;
        long long value = strtoll(text, &end, 10);
        if (end == text || errno || value < 0 || value > INT32_MAX || *count == OPTIONS_MAX_LIST) return false;
        list[(*count)++] = (int32_t)value;
        if (!*end) return true;
        if (*end != ',') return false;
        text = end + 1;
    }
}

/* The place of `text` in a NULL-terminated list, -1 when it is not there. */
static int32_t find_name(const char *const *names, const char *text)
{
    for (int32_t i = 0; names[i]; i++)
        if (!strcmp(names[i], text)) return i;
    return -1;
}

static const char *parse_dtype(options_t *options, const char *text)
{
    static const char *const names[] = {"bf16", "fp16", "fp32", "fp8", "w4", "mxfp4", NULL};
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
    static const epmoe_format_t formats[] = {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
    int32_t i = find_name(names, text);
    if (i < 0) return "bf16, fp16, fp32, fp8, w4 or mxfp4";
    options->dtype = i < 3 ? dtypes[i] : EPMOE_BF16;
    options->weight_format = i < 3 ? EPMOE_FORMAT_NONE : formats[i - 3];
    return NULL;
}

static const char *parse_routing(options_t *options, const char *text)
{
    static const char *const names[] = {"uniform", "one-expert", "router", NULL};
    static const routing_kind_t kinds[] = {ROUTING_UNIFORM, ROUTING_ONE_EXPERT, ROUTING_ROUTER};
    int32_t i = find_name(names, text);
    if (i >= 0) {
        options->routing = kinds[i];
        return NULL;
    }
    if (!strncmp(text, "zipf:", 5)) {
        options->routing = ROUTING_ZIPF;
        return parse_double(text + 5, 0, 100, &options->zipf_exponent) ? NULL : "zipf:S with S in [0,100]";
    }
    if (!strncmp(text, "file:", 5) && text[5]) {
        options->routing = ROUTING_FILE;
        options->routing_path = text + 5;
        return NULL;
    }
    return "uniform, zipf:S, one-expert, file:PATH or router";
}

static const char *parse_placement(options_t *options, const char *text)
{
    static const char expected[] = "contiguous, balanced or balanced:N with N from 1 on";
    options->balanced = strcmp(text, "contiguous") != 0;
    options->num_physical = 0;
    if (!options->balanced || !strcmp(text, "balanced")) return NULL;
    if (strncmp(text, "balanced:", 9)) return expected;
    return parse_int32(text + 9, 1, INT32_MAX, &options->num_physical) ? NULL : expected;
}

static const char *parse_enum(const char *text, const char *const *names, const int32_t *values, int32_t *value,
                              const char *expected)
{
    int32_t i = find_name(names, text);
    if (i < 0) return expected;
    *value = values[i];
    return NULL;
}

static const char *parse_backend(options_t *options, const char *text)
{
    static const char *const names[] = {"auto", "cpu", "cuda", NULL};
    static const int32_t values[] = {EPMOE_BACKEND_AUTO, EPMOE_BACKEND_CPU, EPMOE_BACKEND_CUDA};
    int32_t value = 0;
    const char *expected = parse_enum(text, names, values, &value, "auto, cpu or cuda");
    options->backend = (epmoe_backend_t)value;
    return expected;
}

static const char *parse_transport(options_t *options, const char *text)
{
    static const char *const names[] = {"auto", "p2p", "nccl", "mpi", NULL};
    static const int32_t values[] = {EPMOE_TRANSPORT_AUTO, EPMOE_TRANSPORT_P2P, EPMOE_TRANSPORT_NCCL,
                                     EPMOE_TRANSPORT_MPI};
    int32_t value = 0;
    const char *expected = parse_enum(text, names, values, &value, "auto, p2p, nccl or mpi");
    options->transport = (epmoe_transport_t)value;
    return expected;
}

static const char *parse_sleep(options_t *options, const char *text)
{
    char rank[16];
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : sizeof rank;
    if (length >= sizeof rank) return "RANK:MILLISECONDS";
    memcpy(rank, text, length);
    rank[length] = 0;
    bool good = parse_int32(rank, 0, INT32_MAX, &options->inject_sleep_rank) &&
                parse_int32(colon + 1, 0, 1000000, &options->inject_sleep_ms);
    return good ? NULL : "RANK:MILLISECONDS";
}

static bool is_picture(const char *path)
{
    static const char *const ends[] = {".svg", ".pdf", ".png", NULL};
    const char *end = strrchr(path, '.');
    return end && end > path && find_name(ends, end) >= 0;
}

/* Names with commas between them. */
static const char *parse_ops(options_t *options, const char *text)
{
    static const char *const names[] = {"topk",
                                        "align",
                                        "permute",
                                        "unpermute",
                                        "grouped_gemm",
                                        "silu_and_mul",
                                        "sum",
                                        "silu_and_mul_fp8",
                                        "quantize_fp8",
                                        "dequant",
                                        "router",
                                        "rms_norm",
                                        "rope",
                                        "qk_norm_rope",
                                        "cache_write",
                                        "rope_cache_write",
                                        "attention",
                                        "prefill",
                                        "sample",
                                        "spec_verify",
                                        "exchange",
                                        "rms_norm_alone",
                                        "rms_norm_fp8",
                                        "linear",
                                        "linear_fp8",
                                        "linear_fp8_blocks",
                                        NULL};
    options->num_ops = 0;
    for (;;) {
        char name[32];
        size_t length = strcspn(text, ",");
        int32_t i = -1;
        if (length < sizeof name) {
            memcpy(name, text, length);
            name[length] = 0;
            i = find_name(names, name);
        }
        if (i < 0 || options->num_ops == OPTIONS_MAX_OPS)
            return "up to 64 of topk, align, permute, unpermute, grouped_gemm, silu_and_mul, silu_and_mul_fp8, sum, "
                   "quantize_fp8, dequant, router, rms_norm, rms_norm_alone, rms_norm_fp8, rope, qk_norm_rope, "
                   "cache_write, rope_cache_write, attention, prefill, sample, spec_verify, linear, linear_fp8 and "
                   "linear_fp8_blocks, or exchange";
        options->ops[options->num_ops++] = names[i];
        if (!text[length]) return NULL;
        text += length + 1;
    }
}

static const char *parse_heads(options_t *options, const char *text)
{
    enum { kNumbers = 3 };
    static const char expected[] = "QUERY:KEY:DIM, three numbers from 1 to 1048576";
    int32_t *const numbers[kNumbers] = {&options->heads, &options->kv_heads, &options->head_dim};
    for (int32_t i = 0; i < kNumbers; i++) {
        char number[16];
        size_t length = strcspn(text, ":");
        if (length >= sizeof number || (text[length] == ':') != (i < kNumbers - 1)) return expected;
        memcpy(number, text, length);
        number[length] = 0;
        if (!parse_int32(number, 1, MAX_WIDTH, numbers[i])) return expected;
        text += length + 1;
    }
    if (((int64_t)options->heads + 2 * (int64_t)options->kv_heads) * options->head_dim > INT32_MAX)
        return "QUERY:KEY:DIM with (QUERY + 2 KEY) * DIM below 2^31";
    return NULL;
}

static const char *parse_flag(const char *text, int32_t *value)
{
    return parse_int32(text, 0, 1, value) ? NULL : "0 or 1";
}

/* Takes one option in; what its value should have been, NULL when it is good. */
static const char *parse_option(options_t *options, int option, const char *text)
{
    static const char *const formats[] = {"table", "json", NULL};
    static const char list_expected[] = "numbers from 0 on, with commas between them";
    static const char width_expected[] = "a number from 1 to 1048576";
    const char *expected = NULL;
    int32_t flag = 1;
    int64_t seed = 0;
    switch (option) {
    case OPT_MODEL: options->model = text; break;
    case OPT_CHECKPOINT: options->checkpoint = text; break;
    case OPT_LAYER: return parse_int32(text, 0, INT32_MAX, &options->layer) ? NULL : "a layer's number";
    case OPT_TOKENS: return parse_list(text, options->tokens, &options->num_cases) ? NULL : list_expected;
    case OPT_TOKENS_PER_RANK:
        return parse_list(text, options->tokens_per_rank, &options->num_per_rank) ? NULL : list_expected;
    case OPT_CAPACITY: return parse_int64(text, 1, INT32_MAX, &options->capacity) ? NULL : "a number of rows from 1 on";
    case OPT_DTYPE: return parse_dtype(options, text);
    case OPT_ROUTING: return parse_routing(options, text);
    case OPT_PLACEMENT: return parse_placement(options, text);
    case OPT_BACKEND: return parse_backend(options, text);
    case OPT_TRANSPORT: return parse_transport(options, text);
    case OPT_ITERS: return parse_int32(text, 1, 1000000, &options->iters) ? NULL : "a number from 1 to 1000000";
    case OPT_WARMUP: return parse_int32(text, 0, 1000000, &options->warmup) ? NULL : "a number from 0 to 1000000";
    case OPT_GRAPH: return parse_flag(text, &options->graph);
    case OPT_DECODER: options->decoder = true; break;
    case OPT_CONTEXT:
        return parse_int32(text, 1, 1 << 24, &options->context) ? NULL : "a number of tokens from 1 to 16777216";
    case OPT_CHECK:
        if (text) expected = parse_flag(text, &flag);
        options->check = flag;
        return expected;
    case OPT_FORMAT:
        flag = find_name(formats, text);
        options->json = flag == 1;
        return flag >= 0 ? NULL : "table or json";
    case OPT_PLOT:
        options->plot_path = text;
        return is_picture(text) ? NULL : "the name of a file that ends in .svg, .pdf or .png";
    case OPT_SEED:
        if (!parse_int64(text, 0, INT64_MAX, &seed)) return "a number from 0 on";
        options->seed = (uint64_t)seed;
        break;
    case OPT_TIMEOUT:
        return parse_double(text, 1e-3, 1e6, &options->timeout_s) ? NULL : "seconds from 0.001 to 1000000";
    case OPT_ACT:
        if (strcmp(text, "fp8") && strcmp(text, "none")) return "fp8 or none";
        options->fp8_activations = strcmp(text, "fp8") ? -1 : 1;
        break;
    case OPT_WIRE:
        if (strcmp(text, "fp8") && strcmp(text, "dtype")) return "fp8 or dtype";
        options->wire_dtype = strcmp(text, "fp8") ? EPMOE_DTYPE_NONE : EPMOE_F8_E4M3;
        break;
    case OPT_OP: return parse_ops(options, text);
    case OPT_HIDDEN: return parse_int32(text, 1, MAX_WIDTH, &options->hidden) ? NULL : width_expected;
    case OPT_INTERMEDIATE: return parse_int32(text, 1, MAX_WIDTH, &options->intermediate) ? NULL : width_expected;
    case OPT_TOP_K: return parse_int32(text, 1, EPMOE_MAX_TOP_K, &options->top_k) ? NULL : "a number from 1 to 32";
    case OPT_HEADS: return parse_heads(options, text);
    case OPT_COMM_SMS: return parse_int32(text, 1, 4096, &options->comm_sms) ? NULL : "a number from 1 to 4096";
    case OPT_LIST_MODELS: options->action = ACTION_LIST_MODELS; break;
    case OPT_INJECT_SLEEP: return parse_sleep(options, text);
    case OPT_INJECT_NAN: options->inject_nan = true; break;
    case OPT_HELP: options->action = ACTION_HELP; break;
    }
    return NULL;
}

/* What one option alone cannot know; the fault, NULL when there is none. */
static const char *check_together(options_t *options)
{
    if (options->model && options->checkpoint) return "--model and --checkpoint exclude each other";
    if (options->layer >= 0 && !options->checkpoint) return "--layer needs --checkpoint";
    if (options->num_cases && options->num_per_rank) return "--tokens and --tokens-per-rank exclude each other";
    const bool op = options->num_ops > 0;
    if (options->decoder && op) return "--decoder and --op exclude each other";
    if (options->context && !options->decoder) return "--context needs --decoder";
    if (op && options->checkpoint) return "--op needs a --model, not a --checkpoint";
    for (int32_t i = 0; i < options->num_ops; i++)
        if (!strcmp(options->ops[i], "exchange") && options->num_ops > 1) return "--op exchange runs alone";
    if (!op && (options->hidden || options->intermediate || options->top_k || options->heads))
        return "--hidden, --intermediate, --top-k and --heads need --op";
    if (op && options->wire_dtype && !options_exchange(options)) return "--wire is for the layer and --op exchange";
    if (op && options->comm_sms && !options_exchange(options)) return "--comm-sms is for the layer and --op exchange";
    if (op && options->plot_path) return "--plot draws the layer's cases, not those of --op";
    if (op && options->capacity) return "--capacity is for the layer, not for --op";
    if (op && options->fp8_activations) return "--act is for the layer, not for --op";
    if (op && (options->inject_nan || options->inject_sleep_rank >= 0))
        return "--inject-nan and --inject-sleep are for the layer, not for --op";
    if (op && options->routing == ROUTING_ROUTER)
        return "--op needs a --routing that is known before it runs, not router";
    if (op && options->balanced) return "--placement balanced is for the layer, not for --op";
    if (op && options->num_per_rank) return "--op takes --tokens, not --tokens-per-rank";
    for (int32_t i = 0; i < options->num_cases && op; i++)
        if (!options->tokens[i]) return "--op needs at least one token";
    if (!options->model && !options->checkpoint) options->model = "qwen3-30b-a3b";
    if (!options->num_cases && !options->num_per_rank) options->tokens[options->num_cases++] = 16;
    if (options->num_per_rank) options->num_cases = 1;
    if (options->routing == ROUTING_DEFAULT) options->routing = options->model ? ROUTING_UNIFORM : ROUTING_ROUTER;
    if (options->balanced && options->routing == ROUTING_ROUTER)
        return "--placement balanced needs a --routing that is known before it runs, not router";
    return NULL;
}

int options_parse(options_t *options, const program_t *program, int argc, char **argv)
{
    *options = (options_t){.layer = -1,
                           .dtype = EPMOE_BF16,
                           .iters = -1,
                           .warmup = -1,
                           .graph = -1,
                           .check = true,
                           .seed = 1,
                           .timeout_s = 30,
                           .inject_sleep_rank = -1};
    opterr = 0;
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", k_options, &index)) != -1) {
        const char *given = argv[optind - 1];
        if (option == '?') {
            bool known = optopt >= OPT_MODEL;
            return program_error_once(
                program, PROGRAM_BAD_INPUT,
                known ? "%s: its value is missing or one too many" : "%s: unknown option: see --help", given);
        }
        const char *expected = parse_option(options, option, optarg);
        if (expected)
            return program_error_once(program, PROGRAM_BAD_INPUT, "--%s is '%s': expected %s", k_options[index].name,
                                      optarg, expected);
        if (options->action != ACTION_BENCH) return PROGRAM_OK;
    }
    if (optind < argc)
        return program_error_once(program, PROGRAM_BAD_INPUT, "'%s': unknown argument: see --help", argv[optind]);
    const char *fault = check_together(options);
    if (fault) return program_error_once(program, PROGRAM_BAD_INPUT, "%s", fault);
    if (options->num_per_rank && options->num_per_rank != program->size)
        return program_error_once(program, PROGRAM_BAD_INPUT,
                                  "--tokens-per-rank has %d numbers: expected %d, one for each rank",
                                  options->num_per_rank, program->size);
    if (options->inject_sleep_rank >= program->size)
        return program_error_once(program, PROGRAM_BAD_INPUT, "--inject-sleep is for rank %d: there are %d ranks",
                                  options->inject_sleep_rank, program->size);
    if (options_exchange(options)) {
        if (program->size == 1)
            return program_error_once(program, PROGRAM_BAD_INPUT, "--op exchange needs at least two ranks");
    } else if (options->num_ops && program->size > 1)
        return program_error_once(program, PROGRAM_BAD_INPUT, "--op runs on one rank: there are %d", program->size);
    return PROGRAM_OK;
}
