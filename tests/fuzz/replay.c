/* A target without libFuzzer: runs it over files, and over all files of folders. */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static int num_inputs;

static void run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    fuzz_require(file != NULL, path);
    char *data = NULL;
    size_t capacity = 0, size = 0;
    for (size_t got = 1; got > 0; size += got) {
        if (size == capacity) {
            capacity = capacity ? 2 * capacity : 4096;
            data = realloc(data, capacity);
            fuzz_require(data != NULL, "no memory for an input");
        }
        got = fread(data + size, 1, capacity - size, file);
    }
    fuzz_require(!ferror(file), path);
    fclose(file);
    LLVMFuzzerTestOneInput((const uint8_t *)data, size);
    free(data);
    num_inputs++;
}

static void run_folder(const char *path)
{
    DIR *folder = opendir(path);
    fuzz_require(folder != NULL, path);
    for (struct dirent *entry; (entry = readdir(folder));) {
        char name[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        run_file(name);
    }
    closedir(folder);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        struct stat info;
        fuzz_require(!stat(argv[i], &info), argv[i]);
        if (S_ISDIR(info.st_mode))
            run_folder(argv[i]);
        else
            run_file(argv[i]);
    }
    printf("%d inputs\n", num_inputs);
    return num_inputs ? EXIT_SUCCESS : EXIT_FAILURE;
}
