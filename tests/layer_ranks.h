/* Layers over several ranks, for the programs that tests start under mpirun: every rank also has the same layer for
 * itself alone, and compares. */
#ifndef EPMOE_LAYER_RANKS_H
#define EPMOE_LAYER_RANKS_H

#include "tests/layer_case.h"
#include "tools/program.h"

typedef struct ranks_t {
    program_t program;
    uint64_t seed;
    testing_rng_t rng; /* draws the same on every rank */
    testing_rng_t own; /* differs from rank to rank */
    int32_t checks, failures;
} ranks_t;

/* Connects all ranks. --seed is the first argument. Exits on failure. */
ranks_t ranks_start(const char *name, int *argc, char ***argv);
/* The number of checks on stdout, failures of any rank as an exit code. */
int ranks_finish(ranks_t *ranks);

/* Counts; says on stderr what failed. */
bool ranks_check(ranks_t *ranks, bool good, const char *format, ...) EPMOEI_PRINTF(3, 4);
/* A status and a part of its message. */
void ranks_expect(ranks_t *ranks, const char *what, epmoe_status_t status, epmoe_status_t expected, const char *word);
/* The rank that does wrong in case i: another one in every case. */
static inline int32_t ranks_culprit(const ranks_t *ranks, int32_t i) { return (i + 1) % ranks->program.size; }
/* After a call that failed on rank `culprit` with this status and message: that here if it is us, PEER with the same
 * text elsewhere. */
void ranks_expect_failure(ranks_t *ranks, const char *what, epmoe_status_t status, int32_t culprit,
                          epmoe_status_t expected, const char *word);

/* Gives a config of at most 60 experts a random placement, the same on every rank, with up to as many copies again. */
enum { RANKS_MAX_PHYSICAL = 128 };
void ranks_place(ranks_t *ranks, epmoe_layer_config_t *config, int32_t placement[RANKS_MAX_PHYSICAL]);

/* The layer over all ranks (collective), and the same for this rank alone, which has no placement. NULL after a failed
 * check. */
epmoe_layer_t *ranks_create(ranks_t *ranks, const epmoe_layer_config_t *config);
epmoe_layer_t *ranks_create_alone(ranks_t *ranks, const epmoe_layer_config_t *config);
/* Both, with the random weights of `seed`. */
typedef struct ranks_pair_t {
    epmoe_layer_config_t config;
    epmoe_layer_t *layer, *alone;
} ranks_pair_t;
ranks_pair_t ranks_pair(ranks_t *ranks, const epmoe_layer_config_t *config, uint64_t seed);
void ranks_pair_free(ranks_pair_t *pair);

typedef struct ranks_call_t {
    int32_t tokens;
    const float *logits; /* [tokens,E] or NULL */
    bool residual, in_place, by_num_tokens_dev;
} ranks_call_t;
/* One forward of both layers on new random tokens, compared, expert_load too; the layer over all ranks runs twice,
 * which must give the same bits. Collective. */
void ranks_compare(ranks_t *ranks, const ranks_pair_t *pair, const ranks_call_t *call);

/* Logits [tokens,E] that route every token to experts first..first+k-1; free() them. */
float *ranks_logits_to(int32_t tokens, const epmoe_layer_config_t *config, int32_t first);

#endif
