/* Which experts get copies, and which ranks get them: greedy in both, with the contiguous blocks as the bound. */
#include "comm/comm.h"
#include "comm/placement.h"

#include <stdlib.h>
#include <string.h>

typedef struct copy_t {
    int32_t expert;
    double share; /* of the expert's load */
} copy_t;

typedef struct plan_t {
    const int64_t *load;
    int32_t num_experts, num_physical, size;
    int32_t *num_copies; /* [E] */
    copy_t *copies;      /* [P] by descending share */
    int32_t *first;      /* [R+1] physical experts of each rank */
    int32_t *used;       /* [R] of these, that have an expert */
    double *rank_load;   /* [R] */
    int32_t *packed;     /* [P] the two candidates */
    int32_t *kept;
    void *memory;
} plan_t;

static int64_t carve(char *base, plan_t *plan)
{
    epmoei_arena_t arena = {base, 0};
    plan->num_copies = epmoei_carve(&arena, plan->num_experts * 4LL);
    plan->copies = epmoei_carve(&arena, plan->num_physical * (int64_t)sizeof *plan->copies);
    plan->first = epmoei_carve(&arena, (plan->size + 1) * 4LL);
    plan->used = epmoei_carve(&arena, plan->size * 4LL);
    plan->rank_load = epmoei_carve(&arena, plan->size * 8LL);
    plan->packed = epmoei_carve(&arena, plan->num_physical * 4LL);
    plan->kept = epmoei_carve(&arena, plan->num_physical * 4LL);
    return arena.used;
}

static double share_of(const plan_t *plan, int32_t e) { return (double)plan->load[e] / plan->num_copies[e]; }

/* More copies than ranks are of use to nobody, until all experts have as many. */
static void count_copies(plan_t *plan)
{
    const int64_t enough = (int64_t)plan->size * plan->num_experts;
    for (int32_t e = 0; e < plan->num_experts; e++) plan->num_copies[e] = 1;
    for (int64_t made = plan->num_experts; made < plan->num_physical; made++) {
        int32_t best = -1;
        for (int32_t e = 0; e < plan->num_experts; e++) {
            if (made < enough && plan->num_copies[e] >= plan->size) continue;
            double gain = best < 0 ? 0 : share_of(plan, e) - share_of(plan, best);
            if (best < 0 || gain > 0 || (gain == 0 && plan->num_copies[e] < plan->num_copies[best])) best = e;
        }
        plan->num_copies[best]++;
    }
}

/* Copies of one expert together: a rank with one of them then is found by its last. */
static int by_share(const void *a, const void *b)
{
    const copy_t *x = a, *y = b;
    if (x->share != y->share) return x->share < y->share ? 1 : -1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

static int by_id(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void pack(plan_t *plan)
{
    int32_t num = 0;
    for (int32_t e = 0; e < plan->num_experts; e++)
        for (int32_t i = 0; i < plan->num_copies[e]; i++) plan->copies[num++] = (copy_t){e, share_of(plan, e)};
    qsort(plan->copies, (size_t)num, sizeof *plan->copies, by_share);
    for (int32_t r = 0; r < plan->size; r++) plan->used[r] = 0, plan->rank_load[r] = 0;
    for (int32_t i = 0; i < num; i++) {
        const copy_t copy = plan->copies[i];
        int32_t best = -1;
        bool best_has = true;
        for (int32_t r = 0; r < plan->size; r++) {
            const int32_t next = plan->first[r] + plan->used[r];
            const bool has = plan->used[r] && plan->packed[next - 1] == copy.expert;
            if (next == plan->first[r + 1]) continue;
            if (best < 0 || (best_has && !has) || (best_has == has && plan->rank_load[r] < plan->rank_load[best]))
                best = r, best_has = has;
        }
        plan->packed[plan->first[best] + plan->used[best]++] = copy.expert;
        plan->rank_load[best] += copy.share;
    }
    for (int32_t r = 0; r < plan->size; r++)
        qsort(plan->packed + plan->first[r], (size_t)plan->used[r], sizeof *plan->packed, by_id);
}

/* The contiguous blocks, each filled up with its own first expert, which takes no load from elsewhere. A rank without
 * any gets the busiest expert, of which no rank's share exceeds what one rank had of it before. */
static epmoe_status_t keep(plan_t *plan)
{
    int32_t busiest = 0;
    for (int32_t e = 1; e < plan->num_experts; e++)
        if (plan->load[e] > plan->load[busiest]) busiest = e;
    for (int32_t r = 0; r < plan->size; r++) {
        int32_t first, count;
        EPMOEI_CHECK(epmoe_expert_range(plan->num_experts, plan->size, r, &first, &count));
        for (int32_t p = plan->first[r]; p < plan->first[r + 1]; p++) {
            int32_t i = p - plan->first[r];
            plan->kept[p] = i < count ? first + i : count ? first : busiest;
        }
        qsort(plan->kept + plan->first[r], (size_t)(plan->first[r + 1] - plan->first[r]), sizeof *plan->kept, by_id);
    }
    return EPMOE_OK;
}

/* The load of the busiest rank, were copies to share evenly. */
static double most_of(plan_t *plan, const int32_t *placement)
{
    double most = 0;
    for (int32_t e = 0; e < plan->num_experts; e++) plan->num_copies[e] = 0;
    for (int32_t p = 0; p < plan->num_physical; p++) plan->num_copies[placement[p]]++;
    for (int32_t r = 0; r < plan->size; r++) {
        double load = 0;
        for (int32_t p = plan->first[r]; p < plan->first[r + 1]; p++) load += share_of(plan, placement[p]);
        most = load > most ? load : most;
    }
    return most;
}

static epmoe_status_t check_args(const plan_t *plan, const int32_t *placement)
{
    const int32_t experts = plan->num_experts, physical = plan->num_physical;
    if (experts < 1 || experts > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is %d: expected 1..%d", experts,
                           EPMOE_MAX_EXPERTS);
    if (physical < experts || physical > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_physical is %d: expected %d (num_experts)..%d", physical,
                           experts, EPMOE_MAX_EXPERTS);
    if (plan->size < 1 || plan->size > EPMOEI_MAX_RANKS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "size is %d: expected 1..%d", plan->size, EPMOEI_MAX_RANKS);
    if (!plan->load || !placement)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", plan->load ? "placement" : "load");
    for (int32_t e = 0; e < experts; e++)
        if (plan->load[e] < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "load[%d] is %lld: expected >= 0", e,
                               (long long)plan->load[e]);
    return EPMOE_OK;
}

epmoe_status_t epmoe_placement_plan(const int64_t *load, int32_t num_experts, int32_t num_physical, int32_t size,
                                    int32_t *placement)
{
    plan_t plan = {.load = load, .num_experts = num_experts, .num_physical = num_physical, .size = size};
    EPMOEI_CHECK(check_args(&plan, placement));
    EPMOEI_CHECK(epmoei_alloc_for(&plan.memory, carve(NULL, &plan), "planning a placement"));
    carve(plan.memory, &plan);
    epmoe_status_t status;
    plan.first[0] = 0;
    for (int32_t r = 0; r < size; r++) {
        int32_t first, count;
        EPMOEI_CHECK_GOTO(epmoe_expert_range(num_physical, size, r, &first, &count), done);
        plan.first[r + 1] = first + count;
    }
    count_copies(&plan);
    pack(&plan);
    EPMOEI_CHECK_GOTO(keep(&plan), done);
    const double packed = most_of(&plan, plan.packed), kept = most_of(&plan, plan.kept);
    const bool keeps = kept < packed || (kept == packed && num_physical == num_experts);
    memcpy(placement, keeps ? plan.kept : plan.packed, (size_t)num_physical * 4);
done:
    epmoei_free(plan.memory);
    return status;
}
