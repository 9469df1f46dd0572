#include "tests/fuzz/fuzz.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kSlots = 2, kMaxLinks = 8 };

static char folder[256];
static char links[kMaxLinks][320];
static int num_links;

void fuzz_require(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz: %s (last error: %s)\n", what, epmoe_last_error());
    abort();
}

const char *fuzz_file(int32_t slot, const uint8_t *data, size_t size)
{
    static int files[kSlots];
    static char paths[kSlots][64];
    int *fd = &files[slot];
    if (!*fd) {
        *fd = memfd_create("fuzz", MFD_CLOEXEC);
        fuzz_require(*fd > 0, "no file in memory");
        snprintf(paths[slot], sizeof paths[slot], "/proc/self/fd/%d", *fd);
    }
    fuzz_require(!ftruncate(*fd, 0), "the file in memory cannot be emptied");
    fuzz_require(pwrite(*fd, data, size, 0) == (ssize_t)size, "the file in memory cannot be written");
    return paths[slot];
}

static void remove_folder(void)
{
    for (int i = 0; i < num_links; i++) unlink(links[i]);
    rmdir(folder);
}

const char *fuzz_folder(void)
{
    if (folder[0]) return folder;
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.200s/epmoe_fuzz_XXXXXX", parent && *parent ? parent : "/tmp");
    fuzz_require(mkdtemp(folder) != NULL, "no folder for temporary files");
    atexit(remove_folder);
    return folder;
}

void fuzz_link(const char *target, const char *name)
{
    fuzz_require(num_links < kMaxLinks, "too many links");
    char *path = links[num_links];
    snprintf(path, sizeof links[0], "%s/%s", fuzz_folder(), name);
    fuzz_require(!symlink(target, path), strerror(errno));
    num_links++;
}
