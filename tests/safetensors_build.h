/* Makes .safetensors files and checkpoint folders for tests, correct ones and broken ones. */
#ifndef EPMOE_SAFETENSORS_BUILD_H
#define EPMOE_SAFETENSORS_BUILD_H

#include "tests/testing.h"

#define BUILD_MAX_DIMS 4

typedef struct build_tensor_t {
    char *name;
    char dtype[16]; /* as the format spells it */
    int32_t num_dims;
    int64_t shape[BUILD_MAX_DIMS];
    char *data;
    int64_t bytes;
} build_tensor_t;

typedef struct build_file_t {
    build_tensor_t *tensors;
    int32_t count;
    int64_t header_bytes; /* 0 = as many as the header takes; more pads it with spaces */
} build_file_t;

/* data NULL = zeros. */
void build_add(build_file_t *file, const char *name, const char *dtype, const int64_t *shape, int32_t num_dims,
               const void *data, int64_t bytes);
/* BF16 [rows,cols], or [rows] when cols is 0, filled with build_value. */
void build_weight(build_file_t *file, int64_t rows, int64_t cols, const char *name_format, ...) EPMOEI_PRINTF(4, 5);
/* What build_weight writes as element i of a tensor: exact in bf16, different between neighbours and between names. */
float build_value(const char *name, int64_t i);
build_tensor_t *build_find(const build_file_t *file, const char *name); /* NULL when there is none */
void build_remove(build_file_t *file, const char *name);
void build_free(build_file_t *file);

/* The bytes of the file; free() them. */
char *build_bytes(const build_file_t *file, int64_t *bytes);
void build_save(const build_file_t *file, const char *dir, const char *name);
/* A file of this header text, a header length (-1 = the text's), and data_bytes bytes of data. */
void build_save_raw(const char *path, int64_t header_length, const char *header, int64_t data_bytes);

/* A fresh folder below the system's one for temporary files; build_remove_dir removes it with its files. */
const char *build_make_dir(char path[256]);
void build_remove_dir(const char *path);
void build_save_text(const char *dir, const char *name, const char *text);
void build_save_data(const char *path, const void *data, int64_t bytes);
/* A text file whole, with a NUL behind it; free() it. */
char *build_load_text(const char *path);

#endif
