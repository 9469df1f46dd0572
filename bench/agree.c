#include "bench/agree.h"

#include <math.h>
#include <string.h>

static epmoe_status_t gather(epmoe_comm_t *comm, const void *values, void **all, int64_t bytes)
{
    epmoe_status_t status = epmoei_alloc_for(all, epmoe_comm_size(comm) * bytes, "values of all ranks");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), fail);
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(comm, values, *all, bytes), fail);
    return EPMOE_OK;
fail:
    epmoei_free(*all);
    *all = NULL;
    return status;
}

epmoe_status_t bench_max(epmoe_comm_t *comm, double *values, int64_t count)
{
    double *all = NULL;
    EPMOEI_CHECK(gather(comm, values, (void **)&all, count * 8));
    for (int64_t i = 0; i < count * epmoe_comm_size(comm); i++)
        if (!(all[i] <= values[i % count]) && !isnan(values[i % count])) values[i % count] = all[i];
    epmoei_free(all);
    return EPMOE_OK;
}

epmoe_status_t bench_sum(epmoe_comm_t *comm, int64_t *values, int64_t count)
{
    int64_t *all = NULL;
    EPMOEI_CHECK(gather(comm, values, (void **)&all, count * 8));
    memset(values, 0, (size_t)count * 8);
    for (int64_t i = 0; i < count * epmoe_comm_size(comm); i++) values[i % count] += all[i];
    epmoei_free(all);
    return EPMOE_OK;
}

int bench_report(const program_t *program, epmoe_status_t status)
{
    enum { kText = 768 };
    char own[kText] = "", *all = NULL;
    int code = program_exit_code(status);
    const char *text = epmoe_last_error();
    bool first = true;
    if (status == EPMOE_OK) return code;
    if (status != EPMOE_ERROR_PEER) strncpy(own, *text ? text : epmoe_status_string(status), kText - 1);
    if (program->size > 1 && epmoe_comm_get_async_error(program->comm) == EPMOE_OK &&
        gather(program->comm, own, (void **)&all, kText) == EPMOE_OK) {
        for (int32_t r = 0; r < program->rank; r++) first = first && strcmp(all + (int64_t)r * kText, own);
        epmoei_free(all);
        if (!*own || !first) return code;
    }
    return program_error(program, code, "%s", *own ? own : epmoe_status_string(status));
}
