/* One dispatch/combine of known tokens, checked in full on every rank. Every rank can make the inputs of all ranks, so
 * that it knows which rows must arrive, in which order, and what its own tokens must become. Expert e returns
 * (e + 1) * x, so that a wrong local id shows. */
#ifndef EPMOE_EXCHANGE_CASE_H
#define EPMOE_EXCHANGE_CASE_H

#include "tests/testing.h"

enum { EXCHANGE_MAX_PLACED = 64, EXCHANGE_MAX_PHYSICAL = 2 * EXCHANGE_MAX_PLACED + 2, EXCHANGE_RANKS = 16 };

typedef struct exchange_case_t {
    int32_t size, num_experts, top_k, hidden;
    epmoe_dtype_t dtype;
    int32_t tokens[EXCHANGE_RANKS]; /* per rank; of rank r: tokens[r % EXCHANGE_RANKS] */
    uint64_t seed;
    epmoe_dtype_t wire; /* 0 = dtype */
    bool identity; /* experts return x, x is small integers, k a power of 2, weights are 1/k: y must be x exactly */
    bool large;    /* k is 2, to the first and the last expert with weights 4 and -3.5, x up to fp16's largest: with
                      identity    y must be x / 2 exactly, while a row of one expert is beyond fp16 */
    bool plain;    /* no slot is -1, no shared expert's rows, no residual */
    int32_t first_id, last_id; /* ids are drawn from these; last_id 0 = all experts */
    int32_t num_physical;      /* 0 = no placement */
    int32_t placement[EXCHANGE_MAX_PHYSICAL];
} exchange_case_t;

typedef struct exchange_inputs_t {
    int32_t num_tokens;
    void *x;
    void *arrived; /* x as the experts get it: x itself but for FP8 on the wire */
    int32_t *ids;
    float *weights;
    float *shared;  /* NULL with plain */
    void *residual; /* NULL with plain */
} exchange_inputs_t;

/* Case i of a list: counts of experts that ranks share unequally or that leave some without, any width. */
exchange_case_t exchange_random_case(testing_rng_t *rng, int32_t i, int32_t size);
/* The same with FP8 on the wire, at widths around the 128 columns of a scale. */
exchange_case_t exchange_coded_case(testing_rng_t *rng, int32_t i, int32_t size);
/* Gives a case of at most EXCHANGE_MAX_PLACED experts a random placement, with up to as many copies again and two. */
void exchange_place(testing_rng_t *rng, exchange_case_t *c);
/* A random case with one; some with FP8 on the wire. */
exchange_case_t exchange_placed_case(testing_rng_t *rng, int32_t i, int32_t size);
/* A random case with another number of tokens on every rank, none on one of the first 16. */
exchange_case_t exchange_uneven_case(testing_rng_t *rng, int32_t i, int32_t size);
/* A large case of fp16, with at most so many tokens on a rank. */
exchange_case_t exchange_large_case(int32_t size, int32_t most_tokens, uint64_t seed);
/* An identity case with very different token counts. */
exchange_case_t exchange_identity_case(int32_t size, int32_t hidden, epmoe_dtype_t dtype, uint64_t seed);

exchange_inputs_t exchange_inputs(const exchange_case_t *c, int32_t rank);
void exchange_inputs_free(exchange_inputs_t *inputs);

epmoe_ep_config_t exchange_config(const exchange_case_t *c, int32_t rank);
/* The physical expert that token t of `rank` takes for an expert: by the words of epmoe_ep_create, over all of them. */
int32_t exchange_physical(const exchange_case_t *c, int32_t rank, int64_t t, int32_t expert);
/* expert_load [E] that a dispatch of these tokens adds to what stands there. */
void exchange_add_load(const exchange_case_t *c, const exchange_inputs_t *inputs, int64_t *load);
/* The rank that owns an expert, found by dealing out blocks one after the other. */
int32_t exchange_owner(int32_t num_experts, int32_t size, int32_t expert);

/* y[row] = sum over the local slots j of weights[j] * (expert + 1) * x, or without the factor for identity. */
void exchange_experts(const exchange_case_t *c, int32_t rank, epmoe_dtype_t partial_dtype,
                      const epmoe_dispatch_result_t *rows);

/* Whether all rows that are due, and no others, are there in order; and whether y is what it must be. Host memory.
 * Number of faults, each of which is a line on stderr. */
int32_t exchange_check_rows(const exchange_case_t *c, int32_t rank, const epmoe_dispatch_result_t *rows);
int32_t exchange_check_output(const exchange_case_t *c, int32_t rank, const exchange_inputs_t *inputs, const void *y);

/* Dispatch, experts, combine on an object made with exchange_config. Returns the number of faults, each of which is a
 * line on stderr. y_out, when not NULL, gets a copy of y. */
int32_t exchange_round(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep, int32_t reuse_routing, void *y_out);

#endif
