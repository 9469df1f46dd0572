#include "tests/testing.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GUARD_BYTES 4096
#define POISON      0x7F

uint64_t testing_seed(void)
{
    static uint64_t seed;
    if (seed) return seed;
    const char *text = getenv("EPMOE_TEST_SEED");
    seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    if (!seed) seed = 1;
    fprintf(stderr, "EPMOE_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

testing_rng_t testing_rng(uint64_t seed) { return (testing_rng_t){seed * 0x9E3779B97F4A7C15u + 0x632BE59BD9B4E019u}; }

uint32_t testing_next(testing_rng_t *rng)
{
    uint64_t z = rng->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

int32_t testing_range(testing_rng_t *rng, int32_t lo, int32_t hi)
{
    return lo + (int32_t)(testing_next(rng) % (uint32_t)(hi - lo + 1));
}

float testing_uniform(testing_rng_t *rng, float lo, float hi)
{
    return lo + (hi - lo) * (float)(testing_next(rng) >> 8) * 0x1p-24f;
}

float testing_normal(testing_rng_t *rng)
{
    double u = ((double)testing_next(rng) + 1.0) * 0x1p-32, v = (double)testing_next(rng) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

void testing_fill_normal(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++) epmoei_store(data, dtype, i, scale * testing_normal(rng));
}

/* In front of the data: the allocation's start and the data's size. */
typedef struct guard_header_t {
    unsigned char *start;
    int64_t bytes;
    int64_t total;
} guard_header_t;

static guard_header_t guard_header(const void *data)
{
    guard_header_t header;
    memcpy(&header, (const char *)data - GUARD_BYTES / 2, sizeof header);
    return header;
}

/* Poison byte i counted from the data's start: ...FF 7F FF 7F... for 16-bit NaNs and FF FF FF 7F for F32 and I32. */
static unsigned char poison_at(int64_t i) { return (i & 3) == 3 ? POISON : (i & 3) == 1 ? 0x7F : 0xFF; }

void *testing_buffer(int64_t bytes, int32_t offset)
{
    int64_t total = bytes + offset + 2 * GUARD_BYTES + 64;
    unsigned char *start = aligned_alloc(64, (size_t)((total + 63) / 64 * 64));
    if (!start) abort();
    unsigned char *data = start + GUARD_BYTES + offset;
    for (int64_t i = -GUARD_BYTES / 4; i < bytes + GUARD_BYTES; i++) data[i] = poison_at(i);
    guard_header_t header = {start, bytes, total};
    memcpy(data - GUARD_BYTES / 2, &header, sizeof header);
    return data;
}

void testing_buffer_free(void *data)
{
    if (data) free(guard_header(data).start);
}

bool testing_is_poison(const void *data, int64_t first, int64_t bytes)
{
    for (int64_t i = first; i < first + bytes; i++)
        if (((const unsigned char *)data)[i] != poison_at(i)) return false;
    return true;
}

bool testing_guards_intact(const void *data)
{
    int64_t bytes = guard_header(data).bytes;
    bool before = testing_is_poison(data, -GUARD_BYTES / 4, GUARD_BYTES / 4);
    bool after = testing_is_poison(data, bytes, GUARD_BYTES);
    if (!before || !after) fprintf(stderr, "guard band %s the buffer changed\n", before ? "after" : "before");
    return before && after;
}

double testing_row_error(const void *out, epmoe_dtype_t dtype, const double *ref, int64_t rows, int64_t cols)
{
    double worst = 0;
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t c = 0; c < cols; c++) squares += ref[r * cols + c] * ref[r * cols + c];
        double rms = sqrt(squares / (double)(cols ? cols : 1));
        for (int64_t c = 0; c < cols; c++) {
            double expected = ref[r * cols + c], value = (double)epmoei_load(out, dtype, r * cols + c);
            if (isnan(value) || isnan(expected)) return INFINITY;
            double difference = fabs(value - expected), scale = fabs(expected) + rms;
            double error = difference == 0 ? 0 : difference / scale;
            if (!(error <= worst)) worst = error;
        }
    }
    return worst;
}

double testing_rel_error(const void *out, epmoe_dtype_t dtype, const double *ref, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = (double)epmoei_load(out, dtype, i);
        difference += (value - ref[i]) * (value - ref[i]);
        norm += ref[i] * ref[i];
    }
    if (isnan(difference) || isnan(norm)) return INFINITY;
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static void append(char **text, size_t *length, const char *piece, size_t bytes)
{
    *text = realloc(*text, *length + bytes + 1);
    if (!*text) abort();
    memcpy(*text + *length, piece, bytes);
    *length += bytes;
    (*text)[*length] = 0;
}

static double slowdown(void)
{
    const char *text = getenv("EPMOE_TEST_SLOWDOWN");
    double factor = text ? strtod(text, NULL) : 1;
    return factor > 1 ? factor : 1;
}

testing_process_t testing_run(double limit_s, const char *command_format, ...)
{
    limit_s *= slowdown();
    char command[8192];
    va_list args;
    va_start(args, command_format);
    vsnprintf(command, sizeof command, command_format, args);
    va_end(args);

    testing_process_t process = {.exit_code = -1};
    size_t output_length = 0, errors_length = 0;
    append(&process.output, &output_length, "", 0);
    append(&process.errors, &errors_length, "", 0);
    int out[2], err[2];
    if (pipe(out) || pipe(err)) abort();
    double start = epmoei_now_seconds();
    pid_t child = fork();
    if (child < 0) abort();
    if (child == 0) {
        setpgid(0, 0);
        int null = open("/dev/null", O_RDONLY);
        dup2(null, 0);
        dup2(out[1], 1);
        dup2(err[1], 2);
        close(out[0]), close(err[0]);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    close(out[1]), close(err[1]);
    struct pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    int open_ends = 2;
    while (open_ends > 0) {
        double left = limit_s - (epmoei_now_seconds() - start);
        if (left <= 0) {
            process.timed_out = true;
            break;
        }
        poll(fds, 2, (int)(1000 * (left < 1 ? left : 1)) + 1);
        for (int i = 0; i < 2; i++) {
            if (!(fds[i].revents & (POLLIN | POLLHUP | POLLERR))) continue;
            char piece[4096];
            ssize_t bytes = read(fds[i].fd, piece, sizeof piece);
            if (bytes <= 0) {
                fds[i].fd = -1;
                open_ends--;
            } else if (i == 0)
                append(&process.output, &output_length, piece, (size_t)bytes);
            else
                append(&process.errors, &errors_length, piece, (size_t)bytes);
        }
    }
    if (process.timed_out) kill(-child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    process.seconds = epmoei_now_seconds() - start;
    if (!process.timed_out && WIFEXITED(status)) process.exit_code = WEXITSTATUS(status);
    close(out[0]), close(err[0]);
    return process;
}

void testing_process_free(testing_process_t *process)
{
    free(process->output);
    free(process->errors);
    *process = (testing_process_t){0};
}

testing_terminal_t testing_terminal_open(void)
{
    testing_terminal_t terminal = {.ends = {posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK), -1}};
    if (terminal.ends[0] < 0 || grantpt(terminal.ends[0]) || unlockpt(terminal.ends[0])) abort();
    snprintf(terminal.name, sizeof terminal.name, "%s", ptsname(terminal.ends[0]));
    terminal.ends[1] = open(terminal.name, O_RDWR | O_NOCTTY);
    if (terminal.ends[1] < 0) abort();
    return terminal;
}

char *testing_terminal_close(testing_terminal_t *terminal)
{
    char *text = NULL, piece[4096];
    size_t length = 0;
    ssize_t bytes;
    append(&text, &length, "", 0);
    while ((bytes = read(terminal->ends[0], piece, sizeof piece)) > 0) append(&text, &length, piece, (size_t)bytes);
    close(terminal->ends[0]), close(terminal->ends[1]);
    return text;
}

/* The command line of a process, arguments apart by zeros; empty when it has ended. */
static size_t read_command_line(const char *pid, char *text, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%.20s/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, size, file);
    fclose(file);
    return length;
}

static int32_t count_processes(const char *mark)
{
    char text[8192];
    int32_t found = 0;
    DIR *all = opendir("/proc");
    if (!all) return -1;
    for (struct dirent *entry; (entry = readdir(all));)
        if (isdigit((unsigned char)entry->d_name[0])) {
            size_t length = read_command_line(entry->d_name, text, sizeof text);
            found += memmem(text, length, mark, strlen(mark)) != NULL;
        }
    closedir(all);
    return found;
}

int32_t testing_processes_left(const char *mark)
{
    /* The kernel takes its time to end what was killed. */
    for (int32_t tries = 0; tries < 100 && count_processes(mark) > 0; tries++)
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    return count_processes(mark);
}

const char *testing_mpirun(int32_t ranks)
{
    static char command[512];
    snprintf(command, sizeof command,
             "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 "
             "mpirun --oversubscribe --bind-to none -np %d",
             ranks);
    return command;
}
