#include "tests/checkpoint_folder.h"

#include "base/dtype.h"

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH };

char folder_dir[256];
char folder_log[8192];
static int warnings;

static void keep_warning(void *ctx, epmoe_log_level_t level, const char *message)
{
    (void)ctx;
    (void)level;
    warnings++;
    size_t used = strlen(folder_log);
    snprintf(folder_log + used, sizeof folder_log - used, "%s\n", message);
}

void folder_set_up(void)
{
    build_make_dir(folder_dir);
    epmoe_set_log(keep_warning, NULL);
}

void folder_tear_down(void)
{
    epmoe_set_log(NULL, NULL);
    build_remove_dir(folder_dir);
    cr_assert_eq(epmoei_alloc_live(), 0, "%lld allocations are left", (long long)epmoei_alloc_live());
}

epmoe_checkpoint_t *folder_open(int expected_warnings)
{
    epmoe_checkpoint_t *checkpoint = NULL;
    warnings = 0;
    folder_log[0] = 0;
    epmoe_status_t status = epmoe_checkpoint_open(folder_dir, &checkpoint);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(warnings, expected_warnings, "warnings:\n%s", folder_log);
    return checkpoint;
}

/* Each of `parts` (up to NULL) is in the message. */
static void expect_message(epmoe_status_t got, epmoe_status_t status, va_list parts)
{
    cr_assert_eq(got, status, "got %s: %s", epmoe_status_string(got), epmoe_last_error());
    for (const char *part; (part = va_arg(parts, const char *));)
        cr_assert(strstr(epmoe_last_error(), part), "\"%s\" is not in \"%s\"", part, epmoe_last_error());
}

void folder_expect_fail(epmoe_status_t status, ...)
{
    epmoe_checkpoint_t *untouched = (epmoe_checkpoint_t *)&folder_dir, *checkpoint = untouched;
    va_list parts;
    va_start(parts, status);
    expect_message(epmoe_checkpoint_open(folder_dir, &checkpoint), status, parts);
    va_end(parts);
    cr_assert_eq(checkpoint, untouched);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

float folder_at(const epmoei_view_t *view, int64_t r, int64_t c)
{
    cr_assert(view->data && r < view->rows && c < view->cols);
    return epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride);
}

void folder_check_written(const epmoei_view_t *view, int64_t rows, int64_t cols, const char *name)
{
    cr_assert(view->rows == rows && view->cols == cols, "%s is [%lld,%lld]", name, (long long)view->rows,
              (long long)view->cols);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            cr_assert_eq(folder_at(view, r, c), build_value(name, r * cols + c), "%s", name);
}

void folder_config(const char *model_type, int32_t layers, const char *more)
{
    char text[2048];
    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_experts_per_tok\":1%s%s}",
             model_type, D, layers, *more ? "," : "", more);
    build_save_text(folder_dir, "config.json", text);
}

const char *folder_path(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder_dir, name);
    return path;
}

void folder_add_mixtral(build_file_t *file, int32_t layer)
{
    build_weight(file, 2, D, "model.layers.%d.block_sparse_moe.gate.weight", layer);
    for (int32_t e = 0; e < 2; e++) {
        build_weight(file, F, D, "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", layer, e);
        build_weight(file, D, F, "model.layers.%d.block_sparse_moe.experts.%d.w2.weight", layer, e);
        build_weight(file, F, D, "model.layers.%d.block_sparse_moe.experts.%d.w3.weight", layer, e);
    }
}

void folder_add_mlp(build_file_t *file, const char *prefix, int64_t width)
{
    build_weight(file, width, D, "%sgate_proj.weight", prefix);
    build_weight(file, width, D, "%sup_proj.weight", prefix);
    build_weight(file, D, width, "%sdown_proj.weight", prefix);
}

void folder_add_qwen(build_file_t *file, int32_t layer)
{
    char prefix[128];
    build_weight(file, 3, D, "model.layers.%d.mlp.gate.weight", layer);
    for (int32_t e = 0; e < 3; e++) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.experts.%d.", layer, e);
        folder_add_mlp(file, prefix, F);
    }
}

void folder_save_model(build_file_t *file)
{
    build_save(file, folder_dir, "model.safetensors");
    build_free(file);
}
