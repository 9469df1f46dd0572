#include "bench/plot.h"

#include <errno.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SCRIPT "moe_layer_plot.py"

extern char **environ;

/* The script's path; false when it is not there. */
static bool find_script(char *path, size_t bytes)
{
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return false;
    program[length] = 0;
    char *slash = strrchr(program, '/');
    if (!slash) return false;
    *slash = 0;
    return (size_t)snprintf(path, bytes, "%s/" SCRIPT, program) < bytes && access(path, R_OK) == 0;
}

/* argv[0] is which Python. Its exit status; -1 when it did not start or was ended by a signal. */
static int run_python(char **argv)
{
    pid_t child;
    int state;
    char *chosen = getenv("EPMOE_PYTHON");
    if (chosen) argv[0] = chosen;
    if (posix_spawnp(&child, argv[0], NULL, NULL, argv, environ)) return -1;
    while (waitpid(child, &state, 0) < 0)
        if (errno != EINTR) return -1;
    return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
}

epmoe_status_t plot_begin(bench_t *bench)
{
    static char look[] = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('matplotlib'))";
    char script[PATH_MAX];
    if (!bench->options->plot_path || bench->program->rank) return EPMOE_OK;
    if (!find_script(script, sizeof script))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "--plot: there is no " SCRIPT " beside the program");
    if (run_python((char *[]){"python3", "-c", look, NULL}))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "--plot: there is no python3 with Matplotlib (Debian: "
                                                      "python3-matplotlib); EPMOE_PYTHON names another");
    bench->plot = tmpfile();
    if (bench->plot) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_IO, "--plot: a temporary file cannot be made: %s", strerror(errno));
}

epmoe_status_t plot_end(bench_t *bench, bool good)
{
    char script[PATH_MAX], lines[64];
    epmoe_status_t status = EPMOE_OK;
    if (!bench->plot) return EPMOE_OK;
    if (good && find_script(script, sizeof script)) {
        fflush(bench->plot);
        snprintf(lines, sizeof lines, "/proc/%d/fd/%d", (int)getpid(), fileno(bench->plot));
        fflush(stdout);
        if (run_python(
                (char *[]){"python3", script, lines, "--plot", (char *)(uintptr_t)bench->options->plot_path, NULL}))
            status = epmoei_fail(EPMOE_ERROR_IO, "--plot: %s was not drawn", bench->options->plot_path);
    }
    fclose(bench->plot);
    bench->plot = NULL;
    return status;
}
