/* The layer over ranks: mpi_layer, mpi_layer_faults and mpi_layer_load under mpirun. */
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#define GOLDEN EPMOE_TEST_DATA "/golden"

static const int32_t kRanks[] = {1, 2, 3, 4, 8};

/* The programs print how much they checked: one that left everything out must not pass. */
static void run(int32_t ranks, int64_t least_checks, const char *program, const char *arguments)
{
    testing_process_t process = testing_run(120, "%s " EPMOE_TEST_BIN "/%s %llu %s", testing_mpirun(ranks), program,
                                            (unsigned long long)testing_seed(), arguments);
    const char *checks = strstr(process.output, " checks ");
    cr_expect(process.exit_code == 0 && !process.timed_out && checks && atoll(checks + 8) >= least_checks,
              "%s on %d ranks: exit %d after %.1f s\n%s%s", program, ranks, process.exit_code, process.seconds,
              process.output, process.errors);
    testing_process_free(&process);
}

Test(mpi_layer, equals_one_rank, .timeout = 600)
{
    for (size_t i = 0; i < sizeof kRanks / sizeof kRanks[0]; i++) run(kRanks[i], 2500, "mpi_layer", "20");
}

Test(mpi_layer, sixteen_ranks_equal_one, .timeout = 180) { run(16, 1000, "mpi_layer", "5"); }

Test(mpi_layer, one_rank_fails, .timeout = 600)
{
    for (size_t i = 0; i < sizeof kRanks / sizeof kRanks[0]; i++) run(kRanks[i], 150, "mpi_layer_faults", "");
}

/* Families, a rank that cannot load, a rank that takes longer than timeout_s. */
Test(mpi_layer, checkpoints, .timeout = 600)
{
    char broken[256], arguments[1024];
    build_make_dir(broken);
    char *config = build_load_text(GOLDEN "/qwen2_moe/config.json");
    build_save_text(broken, "config.json", config);
    /* The file without its last byte. */
    testing_process_t copy =
        testing_run(20, "head -c -1 " GOLDEN "/qwen2_moe/model.safetensors >%s/model.safetensors", broken);
    cr_assert_eq(copy.exit_code, 0, "%s", copy.errors);
    testing_process_free(&copy);
    snprintf(arguments, sizeof arguments, GOLDEN " %s", broken);
    for (size_t i = 0; i < sizeof kRanks / sizeof kRanks[0]; i++) run(kRanks[i], 150, "mpi_layer_load", arguments);
    free(config);
    build_remove_dir(broken);
}
