/* Layers over ranks from checkpoints: every family, one rank that cannot load, and one that is slow. Started by
 * test_mpi_layer: mpi_layer_load SEED GOLDEN_FOLDER BROKEN_CHECKPOINT. */
#include "tests/layer_ranks.h"

#include <epmoe/epmoe_mpi.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static epmoe_checkpoint_t *open_checkpoint(ranks_t *ranks, const char *folder, const char *name)
{
    char path[1024];
    epmoe_checkpoint_t *checkpoint = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    epmoe_status_t status = epmoe_checkpoint_open(path, &checkpoint);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    return checkpoint;
}

/* Every layer of a checkpoint: this rank's experts against all of them. */
static void load_family(ranks_t *ranks, const char *folder, const char *family)
{
    epmoe_checkpoint_t *checkpoint = open_checkpoint(ranks, folder, family);
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    if (!checkpoint) return;
    epmoe_checkpoint_get_info(checkpoint, &info);
    ranks_check(ranks, info.num_layers > 0, "%s has no layers", family);
    for (int32_t i = 0; i < 2 * info.num_layers; i++) {
        int32_t placement[RANKS_MAX_PHYSICAL], index = i / 2;
        ranks_pair_t pair = {.config = EPMOE_LAYER_CONFIG_INIT};
        epmoe_status_t status = epmoe_checkpoint_layer_config(checkpoint, index, &pair.config);
        if (i % 2 && pair.config.num_experts) ranks_place(ranks, &pair.config, placement);
        ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
        pair.config.dtype = EPMOE_F32;
        pair.config.max_tokens = 10;
        pair.layer = ranks_create(ranks, &pair.config);
        pair.alone = ranks_create_alone(ranks, &pair.config);
        if (!pair.layer || !pair.alone) break;
        status = epmoe_layer_load_checkpoint(pair.layer, checkpoint, index, NULL);
        ranks_check(ranks, status == EPMOE_OK, "%s: %s", family, epmoe_last_error());
        status = epmoe_layer_load_checkpoint(pair.alone, checkpoint, index, NULL);
        ranks_check(ranks, status == EPMOE_OK, "%s: %s", family, epmoe_last_error());
        ranks_call_t call = {.tokens = testing_range(&ranks->own, 0, 10), .residual = true};
        ranks_compare(ranks, &pair, &call);
        ranks_pair_free(&pair);
    }
    epmoe_checkpoint_close(checkpoint);
}

static int32_t cancel(void *ctx, int64_t done_bytes, int64_t total_bytes)
{
    (void)ctx, (void)done_bytes, (void)total_bytes;
    return 1;
}

/* One rank cannot load: nobody has weights then, and loading again works. */
static void failed_loads(ranks_t *ranks, const char *folder, const char *broken)
{
    enum { MISSING, BROKEN, OTHER_MODEL, NO_SUCH_LAYER, CANCELLED, NO_MEMORY, CASES };
    epmoe_checkpoint_t *good = open_checkpoint(ranks, folder, "qwen2_moe");
    epmoe_checkpoint_t *other = open_checkpoint(ranks, folder, "mixtral");
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    if (!good || !other) return;
    epmoe_checkpoint_layer_config(good, 0, &config);
    config.max_tokens = 4;
    epmoe_layer_t *layer = ranks_create(ranks, &config);
    uint16_t *x = calloc((size_t)config.hidden * 4, 2);
    for (int32_t i = 0; layer && i < CASES; i++) {
        const struct {
            epmoe_status_t status;
            const char *word;
        } expected[] = {[MISSING] = {EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL"},
                        [BROKEN] = {EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL"},
                        [OTHER_MODEL] = {EPMOE_ERROR_MISMATCH, "the layer's "},
                        [NO_SUCH_LAYER] = {EPMOE_ERROR_INVALID_ARGUMENT, "layer is 99"},
                        [CANCELLED] = {EPMOE_ERROR_BAD_STATE, "cancelled"},
                        [NO_MEMORY] = {EPMOE_ERROR_OUT_OF_MEMORY, "no memory"}};
        int32_t culprit = i == CANCELLED ? 0 : ranks_culprit(ranks, i); /* rank 0 always has experts */
        bool bad = ranks->program.rank == culprit;
        epmoe_checkpoint_t *mine = good, *failed = NULL;
        epmoe_load_options_t options = EPMOE_LOAD_OPTIONS_INIT;
        if (bad && i == MISSING)
            ranks_expect(ranks, "missing", epmoe_checkpoint_open("/no/such/folder", &failed), EPMOE_ERROR_IO, "");
        if (bad && i == BROKEN)
            ranks_expect(ranks, "broken", epmoe_checkpoint_open(broken, &failed), EPMOE_ERROR_FORMAT, "safetensors");
        if (bad && (i == MISSING || i == BROKEN)) mine = failed;
        if (bad && i == OTHER_MODEL) mine = other;
        if (bad && i == CANCELLED) options.progress = cancel;
        if (bad && i == NO_MEMORY) epmoei_alloc_fail_at(1);
        epmoe_status_t status = epmoe_layer_load_checkpoint(layer, mine, bad && i == NO_SUCH_LAYER ? 99 : 0, &options);
        epmoei_alloc_fail_at(0);
        ranks_expect_failure(ranks, "load", status, culprit, expected[i].status, expected[i].word);
        status = epmoe_layer_forward(layer, x, x, 4, NULL);
        ranks_expect(ranks, "forward after a failed load", status, EPMOE_ERROR_BAD_STATE, "no weights");
        status = epmoe_layer_load_checkpoint(layer, good, 0, NULL);
        ranks_expect(ranks, "load again", status, EPMOE_OK, "");
        status = epmoe_layer_forward(layer, x, x, 4, NULL);
        ranks_expect(ranks, "forward", status, EPMOE_OK, "");
    }
    free(x);
    epmoe_layer_destroy(layer);
    epmoe_checkpoint_close(good), epmoe_checkpoint_close(other);
}

typedef struct slow_t {
    double first_s, others_s; /* what each expert takes longer */
    int32_t experts;
} slow_t;

static int32_t go_slowly(void *ctx, int64_t done_bytes, int64_t total_bytes)
{
    (void)done_bytes, (void)total_bytes;
    slow_t *slow = ctx;
    double seconds = slow->experts++ ? slow->others_s : slow->first_s;
    nanosleep(&(struct timespec){(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)}, NULL);
    return 0;
}

/* Rank 0 takes longer than timeout_s for its experts together: nobody minds. For a single one: TIMEOUT everywhere. */
static void slow_loads(ranks_t *ranks, const char *folder)
{
    enum { MANY_SHORT_STEPS, ONE_LONG_STEP, CASES };
    epmoe_checkpoint_t *checkpoint = open_checkpoint(ranks, folder, "qwen2_moe");
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    comm_config.timeout_s = 2;
    if (!checkpoint) return;
    epmoe_checkpoint_layer_config(checkpoint, 0, &config);
    config.max_tokens = 4;
    for (int32_t i = 0; i < CASES && ranks->program.size > 1; i++) {
        epmoe_comm_t *comm = NULL;
        epmoe_layer_t *layer = NULL;
        int32_t first, experts;
        epmoe_expert_range(config.num_experts, ranks->program.size, 0, &first, &experts);
        if (!ranks_check(ranks, experts >= 2, "rank 0 has %d experts: no steps between which to meet", experts)) return;
        epmoe_status_t status = epmoe_comm_create_mpi(MPI_COMM_WORLD, &comm_config, &comm);
        if (!ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error())) return;
        status = epmoe_layer_create(&config, comm, &layer);
        if (!ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error())) return;
        double all_s = comm_config.timeout_s * 1.3, start = epmoei_now_seconds();
        slow_t slow = {all_s, 0, 0};
        if (i == MANY_SHORT_STEPS) slow.first_s = slow.others_s = all_s / experts;
        epmoe_load_options_t options = EPMOE_LOAD_OPTIONS_INIT;
        options.progress = go_slowly, options.progress_ctx = &slow;
        status = epmoe_layer_load_checkpoint(layer, checkpoint, 0, ranks->program.rank == 0 ? &options : NULL);
        double took_s = epmoei_now_seconds() - start;
        if (i == MANY_SHORT_STEPS) {
            ranks_expect(ranks, "a slow rank", status, EPMOE_OK, "");
            ranks_check(ranks, took_s >= all_s, "the load took %g s", took_s);
        } else {
            ranks_expect(ranks, "a rank that stops", status, EPMOE_ERROR_TIMEOUT, "load_checkpoint");
            ranks_check(ranks, ranks->program.rank == 0 || took_s < comm_config.timeout_s, "a timeout after %g s",
                        took_s);
        }
        epmoe_layer_destroy(layer);
        epmoe_comm_destroy(comm);
    }
    epmoe_checkpoint_close(checkpoint);
}

int main(int argc, char **argv)
{
    static const char *const families[] = {"mixtral",     "qwen2_moe", "qwen3_moe", "deepseek_v2",
                                           "deepseek_v3", "glm4_moe",  "gpt_oss"};
    ranks_t ranks = ranks_start("mpi_layer_load", &argc, &argv);
    int64_t live = epmoei_alloc_live();
    if (ranks_check(&ranks, argc == 4, "expected SEED GOLDEN_FOLDER BROKEN_CHECKPOINT")) {
        for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) load_family(&ranks, argv[2], families[i]);
        failed_loads(&ranks, argv[2], argv[3]);
        slow_loads(&ranks, argv[2]);
    }
    ranks_check(&ranks, epmoei_alloc_live() == live, "%lld allocations leak", (long long)(epmoei_alloc_live() - live));
    ranks_check(&ranks, epmoe_comm_get_async_error(ranks.program.comm) == EPMOE_OK, "the communicator has failed");
    return ranks_finish(&ranks);
}
