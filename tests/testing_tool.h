/* Running moe_tool on files of a folder of its own. */
#ifndef EPMOE_TESTING_TOOL_H
#define EPMOE_TESTING_TOOL_H

#include "tests/testing.h"
#include "tools/safetensors_write.h"

/* Makes the folder, removes it with all that is in it. */
void testing_folder_make(void);
void testing_folder_remove(void);
/* The full path of a file in the folder; valid until the fourth call after this one. */
const char *testing_path(const char *name);

/* Writes NAME.safetensors of the folder. */
void testing_write(const char *name, const safetensors_output_t *tensors, int32_t count);
#define TESTING_WRITE(name, ...)                                                                                       \
    testing_write(name, (const safetensors_output_t[]){__VA_ARGS__},                                                   \
                  (int32_t)(sizeof((const safetensors_output_t[]){__VA_ARGS__}) / sizeof(safetensors_output_t)))
/* Pads the header of a written file with `bytes` spaces, so that its tensors lose their alignment. */
void testing_shift(const char *name, int32_t bytes);
bool testing_exists(const char *name);

/* Runs moe_tool with these arguments in the folder. */
testing_process_t testing_tool(const char *format, ...) EPMOEI_PRINTF(1, 2);

/* A tensor of NAME.safetensors, copied; ends the test when the file, the tensor or its dtype and size are not these. */
void *testing_read(const char *name, const char *tensor, epmoe_dtype_t dtype, int64_t elements);

#endif
