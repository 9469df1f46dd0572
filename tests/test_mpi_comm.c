/* Communication over MPI: mpi_exchange under mpirun, healthy and with a rank that stops, dies or leaves. */
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PROGRAM EPMOE_TEST_BIN "/mpi_exchange"

static int32_t count(const char *text, const char *word)
{
    int32_t found = 0;
    while ((text = strstr(text, word))) text += strlen(word), found++;
    return found;
}

static void expect_ok(int32_t ranks, double limit_s, const char *arguments)
{
    testing_process_t run = testing_run(limit_s, "%s " PROGRAM " %s", testing_mpirun(ranks), arguments);
    cr_expect(run.exit_code == 0 && !run.timed_out && count(run.output, "ok ") == ranks,
              "%d ranks, %s: exit %d after %.1f s\n%s%s", ranks, arguments, run.exit_code, run.seconds, run.output,
              run.errors);
    testing_process_free(&run);
}

/* Every pair's messages at once, large ones too, in rounds that leave pairs out: nothing waits on anything else. */
Test(mpi_comm, all_to_all, .timeout = 300)
{
    expect_ok(2, 60, "all-to-all 5000000 20");
    expect_ok(8, 120, "all-to-all 3000000 20");
    expect_ok(2, 60, "all-to-all 67108864 2");
}

Test(mpi_comm, dispatch_and_combine, .timeout = 300)
{
    char arguments[64];
    snprintf(arguments, sizeof arguments, "cases %llu", (unsigned long long)testing_seed());
    static const int32_t ranks[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) expect_ok(ranks[i], 120, arguments);
}

/* Some of which have no tokens, or no experts. */
Test(mpi_comm, sixteen_ranks, .timeout = 120)
{
    char arguments[64];
    snprintf(arguments, sizeof arguments, "uneven %llu", (unsigned long long)testing_seed());
    expect_ok(16, 90, arguments);
}

Test(mpi_comm, contract, .timeout = 120) { expect_ok(3, 60, "contract"); }

Test(mpi_comm, sides_that_do_not_match, .timeout = 120)
{
    testing_process_t run = testing_run(60, "%s " PROGRAM " unequal", testing_mpirun(2));
    cr_expect(run.exit_code > 0 && !run.timed_out && run.seconds < 15, "exit %d after %.1f s", run.exit_code,
              run.seconds);
    cr_expect(strstr(run.errors, "rank 0: the transport failed") && strstr(run.errors, "rank 1: the transport failed"),
              "%s", run.errors);
    cr_expect(strstr(run.errors, "rank 0 sent 1000 bytes where 1500 were due"), "%s", run.errors);
    testing_process_free(&run);
}

static void expect_fault(const char *options, const char *kind, int32_t reporting)
{
    enum { RANKS = 4, TIMEOUT_S = 3 };
    char mark[64];
    snprintf(mark, sizeof mark, "mark-%s-%d", kind, (int)getpid());
    /* mpirun --enable-recovery itself ends with 0 whatever its processes do. */
    bool recovery = strstr(options, "recovery") != NULL;
    testing_process_t run = testing_run(60, "%s %s sh -c '" PROGRAM " %s %d %s; code=$?; echo code $code; exit $code'",
                                        testing_mpirun(RANKS), options, kind, TIMEOUT_S, mark);
    cr_expect((run.exit_code != 0 || recovery) && !run.timed_out && run.seconds < 20, "%s %s: exit %d after %.1f s",
              kind, options, run.exit_code, run.seconds);
    cr_expect_null(strstr(run.output, "code 0"), "%s %s: %s", kind, options, run.output);
    cr_expect_eq(testing_processes_left(mark), 0, "%s %s left processes", kind, options);
    for (int32_t r = 0; r < RANKS && reporting; r++) {
        char error[96], then[64];
        if (r == 1) continue;
        snprintf(error, sizeof error, "rank %d: a peer did not answer in time after", r);
        snprintf(then, sizeof then, "rank %d: then %d, all over in 0.0", r, EPMOE_ERROR_BAD_STATE);
        const char *line = strstr(run.output, error), *end = line ? strchr(line, '\n') : NULL;
        const char *peers = line ? strstr(line, "no answer from rank") : NULL;
        cr_expect(peers && end && peers < end, "%s %s, rank %d:\n%s%s", kind, options, r, run.output, run.errors);
        const char *one = peers ? strpbrk(peers, "1\n") : NULL;
        cr_expect(one && *one == '1', "%s %s: rank %d does not name rank 1:\n%s", kind, options, r, run.output);
        line = strstr(run.output, then);
        end = line ? strchr(line, '\n') : NULL;
        cr_expect(end && !strncmp(end - 9, "in time 1", 9), "%s %s, rank %d:\n%s", kind, options, r, run.output);
    }
    testing_process_free(&run);
}

Test(mpi_comm, rank_stops, .timeout = 120) { expect_fault("", "stop", 1); }
Test(mpi_comm, rank_leaves, .timeout = 120) { expect_fault("", "absent", 1); }
/* mpirun ends the survivors itself, at once. */
Test(mpi_comm, rank_dies, .timeout = 120) { expect_fault("", "kill", 0); }
Test(mpi_comm, rank_dies_and_others_go_on, .timeout = 120) { expect_fault("--enable-recovery", "kill", 1); }
