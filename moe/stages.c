#include "moe/stages.h"

#include "base/device.h"

static epmoe_status_t record(const epmoei_stages_t *stages, int32_t index)
{
    if (!stages->events || !stages->events[index]) return EPMOE_OK;
    return epmoei_event_record(stages->events[index], stages->stream);
}

epmoe_status_t epmoei_stages_begin(epmoei_stages_t *stages, epmoe_stream_t stream, void *const *events)
{
    *stages = (epmoei_stages_t){.stream = stream, .events = events, .time = epmoei_now_seconds()};
    return record(stages, EPMOE_STAGE_COUNT);
}

epmoe_status_t epmoei_stages_end(epmoei_stages_t *stages, epmoe_stage_t stage)
{
    if (!stages) return EPMOE_OK;
    double now = epmoei_now_seconds();
    stages->us[stage] += 1e6 * (now - stages->time);
    stages->time = now;
    return record(stages, (int32_t)stage);
}

void epmoei_stages_skip(epmoei_stages_t *stages) { stages->time = epmoei_now_seconds(); }

const char *epmoe_stage_string(epmoe_stage_t stage)
{
    static const char *const names[] = {"router", "align",   "dispatch", "gemm1",    "act",
                                        "gemm2",  "combine", "shared",   "attention"};
    return (int32_t)stage >= 0 && stage < EPMOE_STAGE_COUNT ? names[stage] : "none";
}
