/* Communication of device buffers: mpi_cuda_exchange and mpi_cuda_contract under mpirun, over host memory with ranks
 * that share devices, over NCCL where every rank has one, and through peer memory (mpi_cuda_p2p) in either case. */
#include "base/device.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PROGRAMS EPMOE_TEST_BIN "/mpi_cuda_"

/* Says so where it is seen: Criterion is silent about tests that it skips. */
static void skip(const char *reason)
{
    fprintf(stderr, "skipped: %s\n", reason);
    cr_skip_test("%s", reason);
}

static void need_devices(int32_t count)
{
    char reason[320];
    snprintf(reason, sizeof reason, "%s: %s", epmoei_device_count() ? "too few CUDA devices" : "no CUDA device",
             epmoei_device_absence());
    if (epmoei_device_count() < count) skip(reason);
}

static void need_nccl(void)
{
    need_devices(2);
#if !EPMOE_HAVE_NCCL
    skip("this build has no NCCL");
#endif
}

static int32_t count(const char *text, const char *word)
{
    int32_t found = 0;
    while ((text = strstr(text, word))) text += strlen(word), found++;
    return found;
}

/* `prefix` stands before the program: a wrapper, or "". arguments begin with the rest of the program's name. */
static void expect_ok(int32_t ranks, double limit_s, const char *prefix, const char *arguments)
{
    testing_process_t run = testing_run(limit_s, "%s %s " PROGRAMS "%s", testing_mpirun(ranks), prefix, arguments);
    cr_expect(run.exit_code == 0 && !run.timed_out && count(run.output, "ok ") == ranks,
              "%d ranks, %s: exit %d after %.1f s\n%s%s", ranks, arguments, run.exit_code, run.seconds, run.output,
              run.errors);
    testing_process_free(&run);
}

/* Of mpi_cuda_wire, which has no modes, "wire"; so mpi_cuda_placement. */
static const char *with_seed(const char *mode, const char *rest)
{
    static char arguments[128];
    snprintf(arguments, sizeof arguments, "%s %llu %s", mode, (unsigned long long)testing_seed(), rest);
    return arguments;
}

Test(mpi_cuda, host_memory_gives_the_bits_of_the_cpu, .timeout = 600)
{
    need_devices(1);
    static const int32_t ranks[] = {1, 2, 3, 6, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        expect_ok(ranks[i], 150, "", with_seed("exchange cases", ranks[i] == 1 ? "local" : "mpi"));
}

Test(mpi_cuda, nccl_gives_the_bits_of_host_memory, .timeout = 300)
{
    need_nccl();
    expect_ok(2, 150, "", with_seed("exchange cases", "mpi nccl"));
}

/* Ranks that share a device take turns on it, some milliseconds each. */
Test(mpi_cuda, peer_memory_gives_the_bits_of_the_cpu, .timeout = 900)
{
    need_devices(1);
    static const int32_t ranks[] = {2, 3, 4, 8};
    expect_ok(1, 150, "", with_seed("exchange cases", "p2p"));
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        expect_ok(ranks[i], 200, "", with_seed("exchange cases", "p2p"));
}

Test(mpi_cuda, peer_memory_gives_the_bits_of_nccl, .timeout = 300)
{
    need_nccl();
    expect_ok(2, 150, "", with_seed("exchange cases", "p2p mpi nccl"));
}

Test(mpi_cuda, layers_with_fp8_on_the_wire, .timeout = 600)
{
    need_devices(1);
    expect_ok(2, 250, "", with_seed("wire", "p2p mpi"));
    need_nccl();
    expect_ok(2, 250, "", with_seed("wire", "nccl"));
}

/* Dispatch with copies of experts is among the cases above. */
Test(mpi_cuda, layers_with_copies_of_experts, .timeout = 900)
{
    need_devices(1);
    expect_ok(1, 200, "", with_seed("placement", "local"));
    expect_ok(2, 250, "", with_seed("placement", "p2p mpi"));
    expect_ok(4, 300, "", with_seed("placement", "p2p"));
    need_nccl();
    expect_ok(2, 250, "", with_seed("placement", "p2p nccl"));
}

Test(mpi_cuda, many_rounds_over_peer_memory, .timeout = 900)
{
    need_devices(1);
    expect_ok(2, 300, "", with_seed("p2p rounds", "1000"));
    expect_ok(8, 300, "", with_seed("p2p rounds", "200"));
    expect_ok(2, 300, "", with_seed("p2p rounds-fp8", "400"));
    expect_ok(16, 300, "", with_seed("p2p rounds", "30"));
}

Test(mpi_cuda, graphs_over_peer_memory, .timeout = 900)
{
    need_devices(1);
    static const int32_t ranks[] = {2, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        expect_ok(ranks[i], 200, "", with_seed("p2p graph", "40"));
    expect_ok(2, 200, "", with_seed("p2p graph-fp8", "40"));
    expect_ok(2, 200, "", with_seed("p2p graph-few", "100"));
    expect_ok(4, 200, "", with_seed("p2p graph-few", "40"));
    expect_ok(2, 200, "", with_seed("p2p graph-few-fp8", "100"));
    expect_ok(2, 200, "", with_seed("p2p graphs", "200"));
    expect_ok(2, 200, "", with_seed("p2p graphs-fp8", "200"));
    expect_ok(4, 200, "", with_seed("p2p graphs", "40"));
}

Test(mpi_cuda, contract_over_peer_memory, .timeout = 900)
{
    need_devices(1);
    static const int32_t ranks[] = {2, 3, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        expect_ok(ranks[i], 150, "", "p2p calls");
        expect_ok(ranks[i], 150, "", "p2p errors");
        expect_ok(ranks[i], 150, "", "p2p errors-few");
    }
}

Test(mpi_cuda, large_messages_over_peer_memory, .timeout = 600)
{
    need_devices(1);
    expect_ok(2, 150, "", "exchange large p2p 67108864 4");
    expect_ok(8, 150, "", "exchange large p2p 4194304 4");
}

Test(mpi_cuda, borrowed_communicator, .timeout = 300)
{
    need_nccl();
    expect_ok(2, 150, "", with_seed("exchange borrowed", ""));
}

Test(mpi_cuda, large_messages_over_host_memory, .timeout = 600)
{
    need_devices(1);
    expect_ok(2, 150, "", "exchange large mpi 67108864 4");
    expect_ok(8, 150, "", "exchange large mpi 4194304 4");
}

Test(mpi_cuda, large_messages_over_nccl, .timeout = 300)
{
    need_nccl();
    expect_ok(2, 150, "", "exchange large nccl 67108864 20");
}

Test(mpi_cuda, contract_over_host_memory, .timeout = 300)
{
    need_devices(1);
    expect_ok(2, 100, "", "contract calls mpi");
    expect_ok(3, 100, "", "contract calls mpi");
}

Test(mpi_cuda, contract_over_nccl, .timeout = 300)
{
    need_nccl();
    expect_ok(2, 100, "", "contract calls nccl");
}

Test(mpi_cuda, shared_devices, .timeout = 300)
{
    need_devices(1);
#if EPMOE_HAVE_NCCL
    expect_ok(2, 60, "", "contract shared");
#endif
    char arguments[64];
    snprintf(arguments, sizeof arguments, "contract auto mpi %d", 2);
    expect_ok(2 * epmoei_device_count(), 100, "", arguments);
}

/* Every rank sees a device of its own as ordinal 0. */
Test(mpi_cuda, one_visible_device_per_rank, .timeout = 300)
{
    need_devices(2);
    static const char wrapper[] = "sh -c 'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK exec \"$0\" \"$@\"'";
    expect_ok(2, 60, "", "contract auto p2p 1");
    expect_ok(2, 60, wrapper, "contract auto p2p 1");
    expect_ok(2, 150, wrapper, with_seed("exchange cases", "auto"));
    need_nccl();
    expect_ok(2, 150, wrapper, with_seed("exchange cases", "nccl"));
}

Test(mpi_cuda, auto_where_peer_memory_is_refused, .timeout = 300)
{
    need_devices(2);
#if EPMOE_HAVE_NCCL
    expect_ok(2, 120, "", "contract refused nccl");
#else
    expect_ok(2, 120, "", "contract refused mpi");
#endif
}

static void expect_fault(int32_t ranks, const char *options, const char *kind, const char *transport, bool reporting)
{
    enum { TIMEOUT_S = 5 };
    char mark[64];
    snprintf(mark, sizeof mark, "mark-%s-%s-%d", kind, transport, (int)getpid());
    /* mpirun --enable-recovery itself ends with 0 whatever its processes do. */
    bool recovery = strstr(options, "recovery") != NULL;
    testing_process_t run =
        testing_run(90, "%s %s sh -c '" PROGRAMS "exchange %s %s %d %s; code=$?; echo code $code; exit $code'",
                    testing_mpirun(ranks), options, kind, transport, TIMEOUT_S, mark);
    cr_expect((run.exit_code != 0 || recovery) && !run.timed_out && run.seconds < 45, "%s %s: exit %d after %.1f s",
              kind, options, run.exit_code, run.seconds);
    cr_expect_null(strstr(run.output, "code 0"), "%s %s: %s", kind, options, run.output);
    cr_expect_eq(testing_processes_left(mark), 0, "%s %s left processes", kind, options);
    for (int32_t r = 0; r < ranks && reporting; r++) {
        char late[96], broken[96], then[64];
        if (r == 1) continue;
        snprintf(late, sizeof late, "rank %d: a peer did not answer in time after", r);
        snprintf(broken, sizeof broken, "rank %d: the transport failed after", r);
        snprintf(then, sizeof then, "rank %d: then %d, all over in 0.", r, EPMOE_ERROR_BAD_STATE);
        const char *line = strstr(run.output, late), *end = line ? strchr(line, '\n') : NULL;
        const char *peers = line ? strstr(line, "no answer from rank") : NULL;
        /* NCCL may notice a dead peer before the time is over. */
        bool noticed = !strcmp(transport, "nccl") && !strcmp(kind, "kill") && strstr(run.output, broken);
        /* The memory of a dead peer may be gone with it. */
        snprintf(broken, sizeof broken, "rank %d: a CUDA call failed after", r);
        noticed |= !strcmp(transport, "p2p") && !strcmp(kind, "kill") && strstr(run.output, broken);
        cr_expect(noticed || (peers && end && peers < end), "%s %s, rank %d:\n%s%s", kind, options, r, run.output,
                  run.errors);
        line = strstr(run.output, then);
        end = line ? strchr(line, '\n') : NULL;
        cr_expect(end && !strncmp(end - 9, "in time 1", 9), "%s %s, rank %d:\n%s%s", kind, options, r, run.output,
                  run.errors);
    }
    testing_process_free(&run);
}

Test(mpi_cuda, rank_stops_over_host_memory, .timeout = 300)
{
    need_devices(1);
    expect_fault(4, "", "stop", "mpi", true);
}

Test(mpi_cuda, rank_leaves_over_host_memory, .timeout = 300)
{
    need_devices(1);
    expect_fault(4, "", "absent", "mpi", true);
}

/* mpirun ends the survivors itself, at once, unless it is told not to. */
Test(mpi_cuda, rank_dies_over_host_memory, .timeout = 300)
{
    need_devices(1);
    expect_fault(4, "", "kill", "mpi", false);
    expect_fault(4, "--enable-recovery", "kill", "mpi", true);
}

Test(mpi_cuda, rank_stops_over_nccl, .timeout = 300)
{
    need_nccl();
    expect_fault(2, "", "stop", "nccl", true);
    expect_fault(2, "", "absent", "nccl", true);
}

Test(mpi_cuda, rank_dies_over_nccl, .timeout = 300)
{
    need_nccl();
    expect_fault(2, "", "kill", "nccl", false);
    expect_fault(2, "--enable-recovery", "kill", "nccl", true);
}

Test(mpi_cuda, rank_stops_over_peer_memory, .timeout = 300)
{
    need_devices(1);
    expect_fault(2, "", "stop", "p2p", true);
    expect_fault(4, "", "stop", "p2p", true);
    expect_fault(4, "", "absent", "p2p", true);
}

Test(mpi_cuda, rank_dies_over_peer_memory, .timeout = 300)
{
    need_devices(1);
    expect_fault(4, "", "kill", "p2p", false);
    expect_fault(4, "--enable-recovery", "kill", "p2p", true);
}
