/* What the fuzz targets share. Every fuzz_NAME.c defines LLVMFuzzerTestOneInput; with EPMOE_FUZZ libFuzzer drives it,
 * otherwise replay.c runs it over corpus/NAME, which is a test like any other. A target must not write outside memory
 * but for a folder of links under the system's folder for temporary files. */
#ifndef EPMOE_FUZZ_H
#define EPMOE_FUZZ_H

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The path of a file in memory with this content; valid, like the content, until the next call with the same `slot`
 * (0 or 1). */
const char *fuzz_file(int32_t slot, const uint8_t *data, size_t size);

/* A folder that lives as long as the process. */
const char *fuzz_folder(void);
/* Makes NAME in the folder a link to `target`. */
void fuzz_link(const char *target, const char *name);

/* Ends the process when a target finds what must not be; libFuzzer keeps the input. */
void fuzz_require(bool holds, const char *what);

#endif
