#include "tools/program.h"

#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef EPMOE_HAVE_MPI
#define EPMOE_HAVE_MPI 0
#endif
#if EPMOE_HAVE_MPI
#include <epmoe/epmoe_mpi.h>
#endif

#define DEFAULT_TIMEOUT_S 30.0
#define REPORT_GRACE_NS   1500000000L /* between the first report of a dead peer and the end of the job */
#define ABORT_LIMIT_S     10

static bool is_set(const char *name)
{
    const char *value = getenv(name);
    return value && *value;
}

/* SLURM_NTASKS in an allocation is that of the allocation: it counts this job's processes only in a step that srun
 * started, and not where mpirun runs inside. */
static bool slurm_counts(void)
{
    if (!is_set("SLURM_JOB_ID") && !is_set("SLURM_JOBID")) return true;
    return is_set("SLURM_PROCID") && (is_set("SLURM_STEP_ID") || is_set("SLURM_STEPID")) &&
           !is_set("OMPI_COMM_WORLD_SIZE") && !is_set("PMI_SIZE");
}

/* The first launcher variable that contradicts `size`, NULL when there is none. */
static const char *contradicting_variable(int32_t size)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!is_set(names[i]) || (!strcmp(names[i], "SLURM_NTASKS") && !slurm_counts())) continue;
        char *end;
        long value = strtol(getenv(names[i]), &end, 10);
        if (*end || value != size) return names[i];
    }
    return NULL;
}

#if EPMOE_HAVE_MPI
static bool launched(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",     "PMI_RANK",      "PMIX_RANK",
                                        "PMIX_NAMESPACE",       "SLURM_NTASKS", "SLURM_STEP_ID", "MPI_LOCALNRANKS",
                                        "MV2_COMM_WORLD_SIZE",  "PALS_RANKID",  "ALPS_APP_PE",   "FLUX_TASK_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (is_set(names[i]) && (strcmp(names[i], "SLURM_NTASKS") || slurm_counts())) return true;
    return false;
}

static bool start_mpi(program_t *program, int *argc, char ***argv)
{
    int initialized = 0, provided = 0;
    MPI_Initialized(&initialized);
    if (!initialized && MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) return false;
    program->mpi_started = true;
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    program->rank = rank;
    program->size = size;
    return true;
}
#endif

int program_start(program_t *program, const char *name, int *argc, char ***argv)
{
    *program = (program_t){.name = name, .size = 1, .local_size = 1, .timeout_s = DEFAULT_TIMEOUT_S};
#if EPMOE_HAVE_MPI
    if (launched() && !start_mpi(program, argc, argv))
        return program_error(program, PROGRAM_FAILED, "MPI cannot be started");
#else
    (void)argc, (void)argv;
#endif
    const char *variable = contradicting_variable(program->size);
    if (variable)
        return program_error_once(program, PROGRAM_BAD_INPUT,
                                  "%s is %s but MPI's size is %d: the launcher is not the one of the MPI that this "
                                  "program was built with%s",
                                  variable, getenv(variable), program->size,
                                  EPMOE_HAVE_MPI ? "" : " (it was built without MPI)");
    program->num_threads = omp_get_max_threads();
    return PROGRAM_OK;
}

typedef struct place_t {
    char host[256];
    cpu_set_t cores;
} place_t;

/* The ranks of a machine share the cores that any of them may run on. Over the communicator and not over MPI: ranks
 * that cannot reach each other find out within its timeout. */
static epmoe_status_t share_cores(program_t *program)
{
    epmoe_status_t status = EPMOE_OK;
    place_t own = {.host = ""}, *all = NULL;
    gethostname(own.host, sizeof own.host - 1);
    sched_getaffinity(0, sizeof own.cores, &own.cores);
    status = epmoei_alloc_for((void **)&all, program->size * (int64_t)sizeof own, "places of the ranks");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, status), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(program->comm, &own, all, sizeof own), done);
    program->local_size = 0;
    for (int32_t r = 0; r < program->size; r++) {
        if (strcmp(all[r].host, own.host)) continue;
        program->local_size++;
        CPU_OR(&own.cores, &own.cores, &all[r].cores);
    }
    int32_t cores = CPU_COUNT(&own.cores), share = cores / program->local_size;
    program->threads_limited =
        !is_set("OMP_NUM_THREADS") && (int64_t)program->local_size * omp_get_max_threads() > cores;
    if (program->threads_limited) omp_set_num_threads(share > 1 ? share : 1);
    program->num_threads = omp_get_max_threads();
done:
    epmoei_free(all);
    return status;
}

epmoe_status_t program_connect_another(const program_t *program, const epmoe_comm_config_t *config, epmoe_comm_t **comm)
{
#if EPMOE_HAVE_MPI
    if (program->mpi_started) return epmoe_comm_create_mpi(MPI_COMM_WORLD, config, comm);
#else
    (void)program;
#endif
    return epmoe_comm_create(NULL, config, comm);
}

epmoe_status_t program_connect(program_t *program, const epmoe_comm_config_t *config)
{
    epmoe_status_t status;
    if (config && config->timeout_s > 0) program->timeout_s = config->timeout_s;
#if EPMOE_HAVE_MPI
    /* Asked for by name, MPI runs for one rank too. */
    if (!program->mpi_started && config && config->transport == EPMOE_TRANSPORT_MPI && !start_mpi(program, NULL, NULL))
        return epmoei_fail(EPMOE_ERROR_TRANSPORT, "MPI cannot be started");
#endif
    status = program_connect_another(program, config, &program->comm);
    if (status == EPMOE_OK && program->size > 1) status = share_cores(program);
    program->broken = status == EPMOE_ERROR_TIMEOUT || status == EPMOE_ERROR_TRANSPORT ||
                      status == EPMOE_ERROR_INTERNAL || status == EPMOE_ERROR_OUT_OF_MEMORY;
    return status;
}

int program_exit_code(epmoe_status_t status)
{
    switch (status) {
    case EPMOE_OK: return PROGRAM_OK;
    case EPMOE_ERROR_INVALID_ARGUMENT:
    case EPMOE_ERROR_IO:
    case EPMOE_ERROR_FORMAT: return PROGRAM_BAD_INPUT;
    case EPMOE_ERROR_NOT_SUPPORTED: return PROGRAM_NOT_SUPPORTED;
    default: return PROGRAM_FAILED;
    }
}

static void print_line(const program_t *program, int code, const char *format, va_list args)
{
    char text[2048], where[32] = "";
    vsnprintf(text, sizeof text, format, args);
    if (program->size > 1) snprintf(where, sizeof where, "[rank %d] ", program->rank);
    /* One write per line, so that those of several ranks do not mix. */
    fprintf(stderr, "%s: %s%s\n", code == PROGRAM_NOT_SUPPORTED ? "not supported" : program->name, where, text);
    fflush(stderr);
}

int program_error(const program_t *program, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_line(program, code, format, args);
    va_end(args);
    return code;
}

int program_error_once(const program_t *program, int code, const char *format, ...)
{
    if (program->rank) return code;
    va_list args;
    va_start(args, format);
    print_line(program, code, format, args);
    va_end(args);
    return code;
}

int program_report(const program_t *program, epmoe_status_t status)
{
    if (status == EPMOE_OK) return PROGRAM_OK;
    const char *text = epmoe_last_error();
    return program_error(program, program_exit_code(status), "%s", *text ? text : epmoe_status_string(status));
}

static bool shows_progress(const program_t *program) { return program->rank == 0 && isatty(STDERR_FILENO); }

void program_busy(const program_t *program, const char *format, ...)
{
    if (!shows_progress(program)) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "\r\033[K");
    vfprintf(stderr, format, args);
    va_end(args);
}

void program_idle(const program_t *program)
{
    if (shows_progress(program)) fprintf(stderr, "\r\033[K");
}

static int32_t show_weights(void *ctx, int64_t done_bytes, int64_t total_bytes)
{
    const program_weights_t *weights = ctx;
    program_busy(weights->program, "%s: %.0f of %.0f MB", weights->what, (double)done_bytes * 1e-6,
                 (double)total_bytes * 1e-6);
    return 0;
}

epmoe_load_options_t program_weights_begin(const program_weights_t *weights)
{
    epmoe_load_options_t options = EPMOE_LOAD_OPTIONS_INIT;
    if (!shows_progress(weights->program)) return options;
    program_busy(weights->program, "%s ...", weights->what);
    options.progress = show_weights;
    options.progress_ctx = (void *)(uintptr_t)weights;
    return options;
}

int program_agree_on_code(program_t *program, int code)
{
    if (!program->comm || program->size == 1) return code;
    int32_t own = code, worst = code;
    int32_t *all = malloc((size_t)program->size * sizeof *all);
    if (!all || epmoe_comm_all_gather(program->comm, &own, all, sizeof own) != EPMOE_OK) {
        if (epmoe_comm_get_async_error(program->comm) == EPMOE_OK) program->broken = true;
        worst = code ? code : PROGRAM_FAILED;
    } else {
        for (int32_t i = 0; i < program->size; i++) worst = all[i] > worst ? all[i] : worst;
    }
    free(all);
    return worst;
}

#if EPMOE_HAVE_MPI
static volatile sig_atomic_t late_code;

static void end_late(int signal_number)
{
    (void)signal_number;
    static const char text[] = "a rank did not reach the end in time\n";
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    _exit(late_code);
}

/* From here the process ends with `code` after `seconds`, whatever MPI waits for. */
static void end_within(int code, unsigned seconds)
{
    late_code = code ? code : PROGRAM_FAILED;
    signal(SIGALRM, end_late);
    alarm(seconds);
}
#endif

int program_finish(program_t *program, int code)
{
    if (program->comm && epmoe_comm_get_async_error(program->comm) != EPMOE_OK) program->broken = true;
    if (program->broken && !code) code = PROGRAM_FAILED;
    epmoe_comm_destroy(program->comm);
    program->comm = NULL;
    if (fflush(stdout) && !code) code = program_error(program, PROGRAM_FAILED, "stdout cannot be written");
#if EPMOE_HAVE_MPI
    if (!program->mpi_started) return code;
    if (program->broken) {
        if (program->size > 1)
            nanosleep(&(struct timespec){REPORT_GRACE_NS / 1000000000, REPORT_GRACE_NS % 1000000000}, NULL);
        end_within(code, ABORT_LIMIT_S);
        MPI_Abort(MPI_COMM_WORLD, code);
        _exit(code);
    }
    end_within(code, (unsigned)program->timeout_s + 2);
    MPI_Finalize();
    alarm(0);
    program->mpi_started = false;
#endif
    return code;
}
