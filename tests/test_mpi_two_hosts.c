/* Jobs over two hosts, which are namespaces of this machine (two_hosts.sh): the rows cross a cable that is counted, and
 * that can be taken away. Where namespaces cannot be made the tests are skipped and say why. */
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define HOSTS    EPMOE_SOURCE_DIR "/tests/two_hosts.sh"
#define BENCH    EPMOE_TEST_BIN "/moe_layer_bench --backend cpu --transport mpi"
#define EXCHANGE EPMOE_TEST_BIN "/mpi_exchange"
#define GOLDEN   EPMOE_TEST_DATA "/golden"

enum { RANKS = 4, TIMEOUT_S = 3, LIMIT_S = 90 };

static testing_process_t run_hosts(const char *format, ...)
{
    char arguments[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    testing_process_t run = testing_run(LIMIT_S + 20, HOSTS " --limit %d %s", LIMIT_S, arguments);
    if (run.exit_code == 77) {
        fputs(run.errors, stderr);
        cr_skip_test("%s", run.errors);
    }
    return run;
}

/* What a host sent over a cable, frames with their headers. */
static int64_t sent(const testing_process_t *run, const char *host, const char *cable)
{
    char words[64], end[32];
    long long bytes = -1;
    snprintf(words, sizeof words, "two_hosts: %s sent ", host);
    snprintf(end, sizeof end, " bytes on %s\n", cable);
    for (const char *line = run->output; (line = strstr(line, words)); line++) {
        char *after;
        long long value = strtoll(line + strlen(words), &after, 10);
        if (!strncmp(after, end, strlen(end))) bytes = value;
    }
    cr_assert_geq(bytes, 0, "no count of %s on %s:\n%s%s", host, cable, run->output, run->errors);
    return bytes;
}

/* The rows took the cable that is meant for them, and nothing like them took the other. */
static void expect_crossed(const testing_process_t *run, int64_t from_one, int64_t from_two)
{
    int64_t mgmt = sent(run, "one", "mgmt") + sent(run, "two", "mgmt");
    cr_expect_geq(sent(run, "one", "data"), from_one, "%s", run->output);
    cr_expect_geq(sent(run, "two", "data"), from_two, "%s", run->output);
    cr_expect_lt(mgmt, (from_one + from_two) / 4, "%s", run->output);
}

/* --------------------------------------------------------------------------------------------------------- healthy */

/* All tokens go to the first experts, which are rank 0's, on host one: the rows of host two's ranks go there, and as
 * many come home. */
static void expect_good_bench(const char *options, const char *checkpoint, const char *wire, int32_t row_bytes,
                              int32_t home_bytes)
{
    enum { TOKENS = 2000, FORWARDS = 4, RANKS_AWAY = 2 };
    testing_process_t run =
        run_hosts("--map-by ppr:2:node %s " BENCH " --checkpoint '" GOLDEN "/%s' --check --wire %s --tokens %d "
                  "--iters %d --warmup 1 --routing one-expert --format json",
                  options, checkpoint, wire, TOKENS, FORWARDS - 1);
    cr_assert(run.exit_code == 0 && !run.timed_out, "exit %d after %.1f s\n%s%s", run.exit_code, run.seconds,
              run.output, run.errors);
    json_error_t error;
    json_t *line = json_loads(run.output, JSON_REJECT_DUPLICATES | JSON_DISABLE_EOF_CHECK, &error);
    cr_assert(line, "%s:\n%s", error.text, run.output);
    long long wrong = -1, rows = 0, ranks = 0, machines = 0;
    const char *transport = "";
    int missing = json_unpack_ex(line, &error, 0, "{s:I, s:I, s:I, s:I, s:s}", "wrong", &wrong, "checked_rows", &rows,
                                 "ranks", &ranks, "machines", &machines, "transport", &transport);
    cr_assert_eq(missing, 0, "%s:\n%s", error.text, run.output);
    cr_expect(wrong == 0 && rows > 0, "%lld wrong of %lld rows", wrong, rows);
    cr_expect(ranks == RANKS && machines == 2, "%lld ranks on %lld machines", ranks, machines);
    cr_expect_str_eq(transport, "mpi");
    int64_t count = (int64_t)FORWARDS * RANKS_AWAY * TOKENS;
    expect_crossed(&run, count * home_bytes, count * row_bytes);
    json_decref(line);
    testing_process_free(&run);
}

/* Ranks of one host talk over its own addresses too; ports as behind a firewall. Rows are 64 bf16. */
Test(mpi_two_hosts, bench_over_tcp, .timeout = 150)
{
    expect_good_bench("--mca btl tcp,self --mca oob_tcp_dynamic_ipv4_ports 40000-40099 "
                      "--mca btl_tcp_port_min_v4 40100 --mca btl_tcp_port_range_v4 100",
                      "mixtral", "dtype", 64 * 2, 64 * 2);
}

/* What MPI takes by itself: shared memory within a host. In FP8 a row is 64 codes and a scale. */
Test(mpi_two_hosts, bench_over_tcp_and_shared_memory, .timeout = 150)
{
    expect_good_bench("", "deepseek_v3", "fp8", 64 + 4, 64 * 2);
}

static void expect_ok(const char *program, const char *arguments, const char *word, int64_t bytes)
{
    testing_process_t run = run_hosts("--map-by node " EPMOE_TEST_BIN "/%s %s", program, arguments);
    cr_expect(run.exit_code == 0 && !run.timed_out && strstr(run.output, word), "%s %s: exit %d after %.1f s\n%s%s",
              program, arguments, run.exit_code, run.seconds, run.output, run.errors);
    expect_crossed(&run, bytes, bytes);
    testing_process_free(&run);
}

/* Ranks 0 and 2 are on host one. In even rounds every pair of ranks exchanges 1.5 MB, 6 MB from each host; in odd ones
 * only 0 with 2 and 1 with 3, which share a host. */
Test(mpi_two_hosts, all_to_all, .timeout = 150)
{
    expect_ok("mpi_exchange", "all-to-all 1500000 4", "ok 3", 2 * 4 * 1500000);
}

Test(mpi_two_hosts, dispatch_and_combine, .timeout = 150)
{
    char arguments[64];
    snprintf(arguments, sizeof arguments, "cases %llu", (unsigned long long)testing_seed());
    expect_ok("mpi_exchange", arguments, "ok 3", 1000000);
}

Test(mpi_two_hosts, layer_equals_one_rank, .timeout = 150)
{
    char arguments[64];
    snprintf(arguments, sizeof arguments, "%llu 20", (unsigned long long)testing_seed());
    expect_ok("mpi_layer", arguments, " checks ", 1000000);
}

/* ---------------------------------------------------------------------------------------------------------- faults */

/* "rank R: ERROR after S s: ..." and then "rank R: then 12, ... in time 1". */
static bool reports(const char *output, int32_t rank)
{
    char late[64], failed[64], then[64];
    snprintf(late, sizeof late, "rank %d: a peer did not answer in time after", rank);
    snprintf(failed, sizeof failed, "rank %d: the transport failed after", rank);
    snprintf(then, sizeof then, "rank %d: then %d, all over in 0.", rank, EPMOE_ERROR_BAD_STATE);
    const char *line = strstr(output, then), *end = line ? strchr(line, '\n') : NULL;
    return end && !strncmp(end - 9, "in time 1", 9) && (strstr(output, late) || strstr(output, failed));
}

/* Every rank but `silent` gets an error within the timeout, and the job ends by itself. Rank 1 is on host two, as rank
 * 3; 0 and 2 are on host one. */
static void expect_fault(const char *options, const char *kind, int32_t silent)
{
    testing_process_t run = run_hosts("%s --map-by node sh -c '" EXCHANGE " %s %d fault; code=$?; echo code $code; "
                                      "exit $code'",
                                      options, kind, TIMEOUT_S);
    cr_expect(run.exit_code > 0 && run.exit_code != 125 && !run.timed_out && run.seconds < 40,
              "%s %s: exit %d after %.1f s\n%s%s", options, kind, run.exit_code, run.seconds, run.output, run.errors);
    cr_expect_null(strstr(run.output, "code 0"), "%s %s: %s", options, kind, run.output);
    for (int32_t r = 0; r < RANKS; r++)
        cr_expect(r == silent || reports(run.output, r), "%s %s, rank %d:\n%s%s", options, kind, r, run.output,
                  run.errors);
    cr_expect_gt(sent(&run, "one", "data"), 1000000);
    testing_process_free(&run);
}

Test(mpi_two_hosts, rank_of_the_other_host_stops, .timeout = 150) { expect_fault("", "stop", 1); }
Test(mpi_two_hosts, rank_of_the_other_host_leaves, .timeout = 150) { expect_fault("", "absent", 1); }

/* mpirun ends the survivors itself. Those whom it lets speak say the right thing, and none dies of a broken socket. */
Test(mpi_two_hosts, rank_of_the_other_host_dies, .timeout = 150)
{
    testing_process_t run = run_hosts("--map-by node sh -c '" EXCHANGE " kill %d fault; code=$?; echo code $code; "
                                      "exit $code'",
                                      TIMEOUT_S);
    cr_expect(run.exit_code > 0 && run.exit_code != 125 && !run.timed_out && run.seconds < 40,
              "exit %d after %.1f s\n%s%s", run.exit_code, run.seconds, run.output, run.errors);
    cr_expect(!strstr(run.output, "code 0") && !strstr(run.output, "code 141"), "%s", run.output);
    for (int32_t r = 0; r < RANKS; r++) {
        char then[32];
        snprintf(then, sizeof then, "rank %d: then", r);
        cr_expect(!strstr(run.output, then) || reports(run.output, r), "rank %d:\n%s", r, run.output);
    }
    cr_expect_gt(sent(&run, "one", "data"), 1000000);
    testing_process_free(&run);
}

/* Each rank misses at least those of the other host. */
Test(mpi_two_hosts, cable_is_cut, .timeout = 150) { expect_fault("--cut 20000000", "healthy", -1); }

/* The other host is gone for mpirun too, which then waits for it: the ranks end by themselves all the same. What those
 * of host two say no longer reaches mpirun. */
Test(mpi_two_hosts, host_is_out_of_reach, .timeout = 150)
{
    testing_process_t run = run_hosts("true"); /* skipped before there is a folder to remove */
    testing_process_free(&run);
    enum { PATIENCE_S = 6 }; /* on a busy machine nothing times out before the cut */
    char folder[256];
    build_make_dir(folder);
    run = run_hosts("--limit 40 --cut-all 200000 --map-by node sh -c '" BENCH " --checkpoint \"" GOLDEN "/mixtral\" "
                    "--tokens 64 --iters 1000000 --timeout %d >%s/$OMPI_COMM_WORLD_RANK 2>&1; "
                    "echo code $? >>%s/$OMPI_COMM_WORLD_RANK'",
                    PATIENCE_S, folder, folder);
    cr_expect_geq(sent(&run, "one", "data"), 200000, "the job ended before the cut: %s", run.errors);
    cr_expect(run.exit_code != 0 && run.exit_code != 125, "exit %d: %s", run.exit_code, run.errors);
    int32_t reports_of_one = 0;
    for (int32_t r = 0; r < RANKS; r++) {
        char path[300], words[64];
        snprintf(path, sizeof path, "%s/%d", folder, r);
        snprintf(words, sizeof words, "rank %d of %d gave up after", r, RANKS);
        char *text = build_load_text(path);
        bool has_report = strstr(text, words) && strstr(text, "no answer from rank");
        /* mpirun, once it hears of the first of host one, kills the other there. */
        if (r % 2 == 0)
            reports_of_one += has_report;
        else
            cr_expect(has_report && strstr(text, "code 1\n"), "rank %d says: %s\n%s", r, text, run.errors);
        free(text);
    }
    cr_expect_geq(reports_of_one, 1, "%s", run.errors);
    testing_process_free(&run);
    build_remove_dir(folder);
}

/* An address that both hosts have is not the way from one to the other. MPI may take it nevertheless, and then waits
 * for ever: that is an error in time. */
Test(mpi_two_hosts, interface_that_leads_nowhere, .timeout = 150)
{
    testing_process_t run = run_hosts("--misleading --map-by ppr:2:node " BENCH " --checkpoint '" GOLDEN "/mixtral' "
                                      "--tokens 4 --iters 1 --timeout %d",
                                      TIMEOUT_S);
    cr_expect(!run.timed_out && run.seconds < 40, "exit %d after %.1f s\n%s", run.exit_code, run.seconds, run.errors);
    cr_expect(run.exit_code == 0 || strstr(run.errors, "gave up after"), "exit %d: %s", run.exit_code, run.errors);
    testing_process_free(&run);
}
