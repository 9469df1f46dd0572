/* The life of a program that runs alone or under mpirun: start, communicator, errors, end. Shared by moe_tool and
 * moe_layer_bench.
 *
 *     program_t program;
 *     int code = program_start(&program, "moe_tool", &argc, &argv);
 *     if (!code) code = work(&program);      (parses options, program_connect, program_report on errors)
 *     return program_finish(&program, code);
 *
 * Exit codes: 0 success, 1 failed or wrong, 2 bad input, 3 not supported. */
#ifndef EPMOE_TOOLS_PROGRAM_H
#define EPMOE_TOOLS_PROGRAM_H

#include "base/base.h"

enum { PROGRAM_OK = 0, PROGRAM_FAILED = 1, PROGRAM_BAD_INPUT = 2, PROGRAM_NOT_SUPPORTED = 3 };

typedef struct program_t {
    const char *name;
    int32_t rank;
    int32_t size;
    int32_t local_size;   /* ranks on this machine; 1 before program_connect */
    int32_t num_threads;  /* OpenMP threads of this rank */
    bool threads_limited; /* OMP_NUM_THREADS is unset and the ranks of this machine share its cores */
    bool mpi_started;
    bool broken; /* a peer may be gone: MPI_Finalize would wait for it */
    double timeout_s;
    epmoe_comm_t *comm; /* NULL before program_connect */
} program_t;

/* Starts MPI when a launcher's variables are there (a program started alone needs no MPI and must not depend on one),
 * and finds rank and size. Returns 0, or an exit code after reporting: a launcher that started another number of
 * processes than MPI knows of is PROGRAM_BAD_INPUT. Either way the caller ends with program_finish. MPI may take its
 * own arguments out of argc and argv. */
int program_start(program_t *program, const char *name, int *argc, char ***argv);

/* Makes program->comm over all ranks and shares the cores between the ranks of a machine. Collective, bounded by
 * config->timeout_s (0 = 30). Reports nothing. */
epmoe_status_t program_connect(program_t *program, const epmoe_comm_config_t *config);

/* One more over all ranks, as program_connect makes it; the caller destroys it. */
epmoe_status_t program_connect_another(const program_t *program, const epmoe_comm_config_t *config,
                                       epmoe_comm_t **comm);

/* The exit code of a status: 2 for bad arguments and files, 3 for NOT_SUPPORTED, 1 for everything else. */
int program_exit_code(epmoe_status_t status);

/* Prints one line on stderr: "NAME: [rank r] text", without the rank when there is one rank alone, and with
 * "not supported" in place of NAME for that exit code. Returns `code`. */
int program_error(const program_t *program, int code, const char *format, ...) EPMOEI_PRINTF(3, 4);
/* The same on rank 0 only: for what every rank finds in the same way, such as a wrong option. */
int program_error_once(const program_t *program, int code, const char *format, ...) EPMOEI_PRINTF(3, 4);
/* program_error with this thread's last error, or the status's text where there is none. OK prints nothing. */
int program_report(const program_t *program, epmoe_status_t status);

/* A line on a terminal's stderr while something long runs, by rank 0 alone; nothing where stderr is no terminal. It
 * stays until the next one, or program_idle wipes it, which has to come before anything else is printed. */
void program_busy(const program_t *program, const char *format, ...) EPMOEI_PRINTF(2, 3);
void program_idle(const program_t *program);
/* Such a line of weights that are made or loaded, with megabytes as they come; what: a text that stays. */
typedef struct program_weights_t {
    const program_t *program;
    const char *what;
} program_weights_t;
epmoe_load_options_t program_weights_begin(const program_weights_t *weights);

/* Collective: the largest code of all ranks, so that every rank ends with the same one. Where the communicator has
 * failed the own code, or PROGRAM_FAILED in place of 0. */
int program_agree_on_code(program_t *program, int code);

/* Destroys the communicator and ends MPI. When a peer may be gone the other ranks get a moment to report, then the job
 * is aborted: the process ends here, never waiting and never with 0. Otherwise returns `code`. */
int program_finish(program_t *program, int code);

#endif
