/* Memory that runs out anywhere while a checkpoint is opened and its layers are loaded, in every format: a status that
 * says so, nothing left behind, and the next try works. */
#include "base/base.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN EPMOE_TEST_DATA "/golden/"

static const char *const checkpoints[] = {"mixtral",       "deepseek_v3",    "deepseek_v3_ct_w4",
                                          "gpt_oss_mxfp4", "qwen3_moe_awq",  "deepseek_v3_gptq_actorder",
                                          "qwen2_moe",     "deepseek_v3_fp8"};
enum { kCheckpoints = sizeof checkpoints / sizeof checkpoints[0] };

/* JSON's own allocator: its n-th allocation fails. */
static int64_t json_fail_at, json_live;

static void *json_take(size_t bytes)
{
    if (json_fail_at > 0 && --json_fail_at == 0) {
        errno = ENOMEM;
        return NULL;
    }
    void *memory = malloc(bytes);
    json_live += memory != NULL;
    return memory;
}

static void json_give(void *memory)
{
    json_live -= memory != NULL;
    free(memory);
}

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, GOLDEN "%s", name);
    return path;
}

Test(faults, no_memory_while_a_layer_is_loaded)
{
    for (int32_t i = 0; i < kCheckpoints; i++) {
        epmoe_checkpoint_t *checkpoint;
        epmoe_checkpoint_info_t about = EPMOE_CHECKPOINT_INFO_INIT;
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        epmoe_layer_t *layer;
        cr_assert_eq(epmoe_checkpoint_open(path_of(checkpoints[i]), &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, &about), EPMOE_OK);
        int32_t index = about.num_layers - 1, failures = 0;
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, index, &config), EPMOE_OK);
        config.dtype = EPMOE_F32;
        config.max_tokens = 1;
        cr_assert_eq(epmoe_layer_create(&config, NULL, &layer), EPMOE_OK);
        int64_t live = epmoei_alloc_live();
        float *x = calloc((size_t)config.hidden, sizeof *x), *y = calloc((size_t)config.hidden, sizeof *y);
        x[0] = 1;
        for (int32_t n = 1;; n++) {
            epmoei_alloc_fail_at(n);
            epmoe_status_t status = epmoe_layer_load_checkpoint(layer, checkpoint, index, NULL);
            epmoei_alloc_fail_at(0);
            if (status == EPMOE_OK) break;
            failures++;
            cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "%s, allocation %d: %s", checkpoints[i], n,
                         epmoe_last_error());
            cr_assert_eq(epmoei_alloc_live(), live, "%s, allocation %d is left", checkpoints[i], n);
            cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_ERROR_BAD_STATE);
        }
        cr_assert_geq(failures, 1, "%s", checkpoints[i]);
        cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_OK);
        double sum = 0;
        for (int32_t c = 0; c < config.hidden; c++) sum += fabs((double)y[c]);
        cr_assert(sum > 0 && isfinite(sum), "%s", checkpoints[i]);
        free(x);
        free(y);
        epmoe_layer_destroy(layer);
        epmoe_checkpoint_close(checkpoint);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}

Test(faults, no_memory_while_a_checkpoint_is_opened)
{
    json_set_alloc_funcs(json_take, json_give);
    for (int32_t i = 0; i < kCheckpoints; i++)
        for (int32_t of_json = 0; of_json < 2; of_json++) {
            /* Neighbours fail alike: past the first hundred every 17th will do. */
            for (int32_t n = 1, failures = 0;; n += n < 100 ? 1 : 17, failures++) {
                epmoe_checkpoint_t *checkpoint = NULL; /* not written on an error */
                json_fail_at = of_json ? n : 0;
                epmoei_alloc_fail_at(of_json ? 0 : n);
                epmoe_status_t status = epmoe_checkpoint_open(path_of(checkpoints[i]), &checkpoint);
                json_fail_at = 0;
                epmoei_alloc_fail_at(0);
                if (status == EPMOE_OK) {
                    epmoe_checkpoint_close(checkpoint);
                    cr_assert_geq(failures, 3, "%s", checkpoints[i]);
                    break;
                }
                cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "%s, %s allocation %d: %s", checkpoints[i],
                             of_json ? "JSON's" : "own", n, epmoe_last_error());
                cr_assert_null(checkpoint);
                cr_assert(epmoei_alloc_live() == 0 && json_live == 0, "%s, %s allocation %d: %lld and %lld are left",
                          checkpoints[i], of_json ? "JSON's" : "own", n, (long long)epmoei_alloc_live(),
                          (long long)json_live);
            }
            cr_assert(epmoei_alloc_live() == 0 && json_live == 0);
        }
}
