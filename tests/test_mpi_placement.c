/* Layers with placements over ranks: mpi_placement under mpirun. */
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdlib.h>

Test(mpi_placement, equals_one_rank, .timeout = 600)
{
    static const int32_t ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        testing_process_t run = testing_run(120, "%s " EPMOE_TEST_BIN "/mpi_placement %llu 30",
                                            testing_mpirun(ranks[i]), (unsigned long long)testing_seed());
        /* The program prints how much it checked. */
        const char *checks = strstr(run.output, " checks ");
        cr_expect(run.exit_code == 0 && !run.timed_out && checks && atoll(checks + 8) >= 600,
                  "%d ranks: exit %d after %.1f s\n%s%s", ranks[i], run.exit_code, run.seconds, run.output, run.errors);
        testing_process_free(&run);
    }
}
