/* What the tests share: a seeded generator, poisoned and guarded buffers, comparisons that a NaN fails, and running a
 * program with a time limit. */
#ifndef EPMOE_TESTING_H
#define EPMOE_TESTING_H

#include "base/dtype.h"

/* The seed of this run: EPMOE_TEST_SEED, or the clock. Printed once to stderr, so that a failure can be repeated. */
uint64_t testing_seed(void);

typedef struct testing_rng_t {
    uint64_t state;
} testing_rng_t;
testing_rng_t testing_rng(uint64_t seed);
uint32_t testing_next(testing_rng_t *rng);
int32_t testing_range(testing_rng_t *rng, int32_t lo, int32_t hi); /* lo..hi inclusive */
float testing_uniform(testing_rng_t *rng, float lo, float hi);
float testing_normal(testing_rng_t *rng);
/* n normal values times scale, rounded to dtype. */
void testing_fill_normal(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t n, float scale);

/* A buffer of `bytes` between two guard bands. All of it starts as poison: 0x7F bytes except that floats read as NaN
 * (F32 0x7FFFFFFF, BF16 and F16 0x7FFF) and I32 as 0x7FFFFFFF. offset shifts the data off its 64-byte alignment. */
void *testing_buffer(int64_t bytes, int32_t offset);
void testing_buffer_free(void *data);
/* False (and a line on stderr) when a guard band changed. */
bool testing_guards_intact(const void *data);
/* True when [first, first+bytes) of the buffer is still poison. */
bool testing_is_poison(const void *data, int64_t first, int64_t bytes);

/* The largest |out-ref| / (|ref| + rms of the ref row) over [rows,cols]; infinity when out has a NaN. */
double testing_row_error(const void *out, epmoe_dtype_t dtype, const double *ref, int64_t rows, int64_t cols);
/* |out-ref| / |ref| over n elements (Frobenius); infinity for a NaN. */
double testing_rel_error(const void *out, epmoe_dtype_t dtype, const double *ref, int64_t n);

typedef struct testing_process_t {
    int exit_code; /* -1 when it was killed by a signal or by the time limit */
    bool timed_out;
    double seconds;
    char *output; /* stdout, then stderr; free with testing_process_free */
    char *errors;
} testing_process_t;
/* Runs `command` with /bin/sh in its own process group; the whole group is killed at the limit, which
 * EPMOE_TEST_SLOWDOWN stretches so many times: for programs built to be watched. */
testing_process_t testing_run(double limit_s, const char *command_format, ...) EPMOEI_PRINTF(2, 3);
void testing_process_free(testing_process_t *process);
/* A terminal: what a process writes to the file `name` stays until it is read. Ends the program where there is none. */
typedef struct testing_terminal_t {
    int ends[2]; /* the reader's, and one that keeps it open */
    char name[64];
} testing_terminal_t;
testing_terminal_t testing_terminal_open(void);
/* What was written, which has ended; free. Closes it. */
char *testing_terminal_close(testing_terminal_t *terminal);
/* Processes with this word in their command line that are still there two seconds later; -1 when nobody can say. */
int32_t testing_processes_left(const char *mark);
/* "mpirun ... -np N" with what root, few cores and one thread per rank need. */
const char *testing_mpirun(int32_t ranks);

#endif
