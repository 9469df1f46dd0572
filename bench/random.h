/* Random numbers as a function of (seed, stream, index), so that every rank can make any rank's data. */
#ifndef EPMOE_BENCH_RANDOM_H
#define EPMOE_BENCH_RANDOM_H

#include <stdint.h>

/* What a number is for: different streams of one seed are independent. */
typedef enum random_stream_t {
    RANDOM_INPUT = 1,
    RANDOM_ROUTING = 2,
    RANDOM_LOGITS = 3,
    RANDOM_PERMUTATION = 4,
    RANDOM_ROWS = 5,
    RANDOM_OP = 6,
} random_stream_t;

#define RANDOM_STEP 0x9E3779B97F4A7C15u

static inline uint64_t random_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A generator of its own for each index; then random_next (splitmix64) steps it. */
static inline uint64_t random_start(uint64_t seed, random_stream_t stream, int64_t index)
{
    uint64_t key = random_mix(seed + RANDOM_STEP * (uint64_t)stream);
    return random_mix(key + RANDOM_STEP * ((uint64_t)index + 1));
}

static inline uint64_t random_next(uint64_t *state) { return random_mix(*state += RANDOM_STEP); }

/* In (0,1): never an end, so that its logarithm is finite. */
static inline double random_unit(uint64_t *state) { return ((double)(random_next(state) >> 12) + 0.5) * 0x1p-52; }

/* 0..n-1. */
static inline int32_t random_below(uint64_t *state, int32_t n)
{
    return (int32_t)(((random_next(state) >> 32) * (uint64_t)n) >> 32);
}

#endif
