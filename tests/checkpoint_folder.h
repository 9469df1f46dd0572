/* A folder in which a test builds one checkpoint after the other, and what opening it must say. For Criterion tests. */
#ifndef EPMOE_CHECKPOINT_FOLDER_H
#define EPMOE_CHECKPOINT_FOLDER_H

#include "moe/checkpoint.h"
#include "tests/safetensors_build.h"

/* Sizes of the toys: hidden_size, and the width of an expert. */
enum { FOLDER_HIDDEN = 4, FOLDER_WIDTH = 2 };

extern char folder_dir[256];
extern char folder_log[8192]; /* the warnings of the last folder_open, a line each */

/* .init and .fini of a suite: the folder, and nothing left allocated after it. */
void folder_set_up(void);
void folder_tear_down(void);
const char *folder_path(const char *name); /* valid until the next call */

/* Opens the folder, with so many warnings. */
epmoe_checkpoint_t *folder_open(int expected_warnings);
/* Opening it fails with `status`, and each of the texts up to NULL is in the message. */
void folder_expect_fail(epmoe_status_t status, ...);
float folder_at(const epmoei_view_t *view, int64_t r, int64_t c);
/* The view is [rows,cols] of what build_weight wrote under this name. */
void folder_check_written(const epmoei_view_t *view, int64_t rows, int64_t cols, const char *name);

/* config.json; `more` is put behind the common keys. */
void folder_config(const char *model_type, int32_t layers, const char *more);
#define FOLDER_MIXTRAL  "\"num_local_experts\":2,\"intermediate_size\":2"
#define FOLDER_QWEN     "\"num_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":6"
#define FOLDER_DEEPSEEK "\"n_routed_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":6"

/* Layers with 2 experts of mixtral's kind, with 3 of that of Qwen and DeepSeek, and one MLP. */
void folder_add_mixtral(build_file_t *file, int32_t layer);
void folder_add_qwen(build_file_t *file, int32_t layer);
void folder_add_mlp(build_file_t *file, const char *prefix, int64_t width);
/* model.safetensors; frees the file. */
void folder_save_model(build_file_t *file);

#endif
