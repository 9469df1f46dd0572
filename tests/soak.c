/* Many forwards of layers whose shapes and token counts change, made and destroyed in between: memory must not grow,
 * and equal inputs must give equal bits at the end as at the start. Alone or under mpirun. soak [FORWARDS (default
 * 2000)] */
#include "tests/testing.h"
#include "tools/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kLayers = 5, kMaxTokens = 48, kMaxHidden = 96, kRenewEvery = 500 };

/* Sums, groups, biases, a shared expert, one expert, quantised weights. */
static epmoe_layer_config_t config_of(int32_t i)
{
    static const epmoe_layer_config_t configs[kLayers] = {
        {.hidden = 64, .intermediate = 32, .num_experts = 8, .top_k = 2, .dtype = EPMOE_F32, .renormalize = 1},
        {.hidden = 96,
         .intermediate = 24,
         .num_experts = 12,
         .top_k = 3,
         .dtype = EPMOE_BF16,
         .scoring = EPMOE_SCORING_SIGMOID,
         .n_group = 4,
         .topk_group = 2,
         .has_selection_bias = 1,
         .shared_intermediate = 40,
         .shared_gated = 1},
        {.hidden = 40,
         .intermediate = 56,
         .num_experts = 5,
         .top_k = 5,
         .dtype = EPMOE_F16,
         .expert_has_bias = 1,
         .router_has_bias = 1,
         .scoring = EPMOE_SCORING_TOPK_SOFTMAX,
         .activation = EPMOE_ACTIVATION_SWIGLU_OAI},
        {.hidden = 8, .intermediate = 8, .num_experts = 1, .top_k = 1, .dtype = EPMOE_BF16},
        {.hidden = 64,
         .intermediate = 64,
         .num_experts = 6,
         .top_k = 2,
         .dtype = EPMOE_BF16,
         .weight_format = EPMOE_FORMAT_W4,
         .weight_group = 32},
    };
    epmoe_layer_config_t config = configs[i];
    config.struct_size = sizeof config;
    config.max_tokens = kMaxTokens;
    return config;
}

static int64_t resident_bytes(void)
{
    long long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%lld %lld", &size, &resident) != 2) resident = 0;
    if (file) fclose(file);
    return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

typedef struct soak_t {
    program_t *program;
    epmoe_layer_t *layers[kLayers];
    float first[kLayers][kMaxHidden]; /* what each layer gave for its first token at the start */
    char x[kMaxTokens * kMaxHidden * 4], y[kMaxTokens * kMaxHidden * 4];
    testing_rng_t shared, own; /* the same on all ranks; this rank's */
} soak_t;

static void destroy_layers(soak_t *soak)
{
    for (int32_t i = 0; i < kLayers; i++) {
        epmoe_layer_destroy(soak->layers[i]);
        soak->layers[i] = NULL;
    }
}

static epmoe_status_t make_layers(soak_t *soak)
{
    destroy_layers(soak);
    for (int32_t i = 0; i < kLayers; i++) {
        epmoe_layer_config_t config = config_of(i);
        EPMOEI_CHECK(epmoe_layer_create(&config, soak->program->comm, &soak->layers[i]));
        EPMOEI_CHECK(epmoe_layer_set_random_weights(soak->layers[i], 7));
    }
    return EPMOE_OK;
}

static epmoe_status_t forward(soak_t *soak, int32_t i, int32_t num_tokens, uint64_t seed)
{
    epmoe_layer_config_t config = config_of(i);
    testing_rng_t rng = testing_rng(seed);
    testing_fill_normal(&rng, soak->x, config.dtype, (int64_t)num_tokens * config.hidden, 1);
    return epmoe_layer_forward(soak->layers[i], soak->x, soak->y, num_tokens, NULL);
}

/* One token per rank and layer, the same at every call. Returns how many values differ from the first time. */
static int32_t probe(soak_t *soak, bool keep, epmoe_status_t *status)
{
    int32_t wrong = 0;
    for (int32_t i = 0; i < kLayers; i++) {
        *status = forward(soak, i, 1, 1000 + (uint64_t)soak->program->rank);
        if (*status != EPMOE_OK) return 1;
        size_t bytes = (size_t)config_of(i).hidden * (size_t)epmoe_dtype_size(config_of(i).dtype);
        if (keep) memcpy(soak->first[i], soak->y, bytes);
        wrong += memcmp(soak->first[i], soak->y, bytes) != 0;
    }
    return wrong;
}

static epmoe_status_t run(soak_t *soak, int64_t forwards, int32_t *wrong)
{
    epmoe_status_t status;
    int64_t live = 0, resident = 0, most = 0;
    EPMOEI_CHECK(make_layers(soak));
    probe(soak, true, &status);
    EPMOEI_CHECK(status);
    for (int64_t n = 0; n < forwards; n++) {
        if (n % kRenewEvery == kRenewEvery - 1) EPMOEI_CHECK(make_layers(soak));
        int32_t i = testing_range(&soak->shared, 0, kLayers - 1);
        EPMOEI_CHECK(forward(soak, i, testing_range(&soak->own, 0, kMaxTokens), testing_next(&soak->own)));
        /* By then every layer has seen its largest T, and buffers of libraries have their size. */
        if (n == forwards / 4) live = epmoei_alloc_live();
        if (n >= forwards / 4 && n < forwards / 2) resident = epmoei_max64(resident, resident_bytes());
        if (n >= forwards - forwards / 4) most = epmoei_max64(most, resident_bytes());
    }
    *wrong = probe(soak, false, &status);
    EPMOEI_CHECK(status);
    printf("rank %d: %lld forwards, resident %lld KiB in the second quarter, %lld KiB in the last, %d layers differ\n",
           soak->program->rank, (long long)forwards, (long long)(resident / 1024), (long long)(most / 1024), *wrong);
    if (epmoei_alloc_live() != live)
        return epmoei_fail(EPMOE_ERROR_INTERNAL, "%lld allocations are alive: there were %lld",
                           (long long)epmoei_alloc_live(), (long long)live);
    /* Less than 4 bytes per forward at 100,000: what the allocator and MPI keep moves by pages. */
    if (!SOAK_SANITIZED && most > resident + 384 * 1024)
        return epmoei_fail(EPMOE_ERROR_INTERNAL, "memory grew by %lld KiB", (long long)((most - resident) / 1024));
    return EPMOE_OK;
}

int main(int argc, char **argv)
{
    static soak_t soak;
    program_t program;
    int32_t wrong = 0;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = EPMOE_BACKEND_CPU;
    int code = program_start(&program, "soak", &argc, &argv);
    int64_t forwards = argc > 1 ? strtoll(argv[1], NULL, 10) : 2000;
    soak.program = &program;
    soak.shared = testing_rng(1); /* of all ranks */
    soak.own = testing_rng(100 + (uint64_t)program.rank);
    if (!code && forwards < 8) code = program_error_once(&program, PROGRAM_BAD_INPUT, "FORWARDS is below 8");
    if (!code) code = program_report(&program, program_connect(&program, &config));
    if (!code) code = program_report(&program, run(&soak, forwards, &wrong));
    if (!code && wrong)
        code = program_error(&program, PROGRAM_FAILED, "%d layers do not give the bits of the start", wrong);
    destroy_layers(&soak);
    return program_finish(&program, program_agree_on_code(&program, code));
}
