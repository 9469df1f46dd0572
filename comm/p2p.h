/* Transport p2p: kernels store rows into the memory of other ranks, which every rank has mapped, and tell each other by
 * flags there that they are done. The host plans nothing and waits for nothing.
 *
 * One dispatch object has one window per rank: the memory that the other ranks may touch. Dispatch number e (its epoch,
 * counted on the device, so that the replay of a graph counts too):
 *   route     the ranks of every token, how many rows for each rank; the counts go to every rank as words that carry
 *             the epoch (the header)
 *   send      waits for the headers of all ranks, after which every rank knows where every row lies at every rank;
 *             stores each row, its ids and its weights there; each block raises rows_there[this rank, block] at every
 *             rank when its rows are; the last block to begin waits for those of all blocks of all ranks.
 *             In FP8 rows are coded as they are read; those of the own rank are decoded at once.
 *             A rank with very few tokens has no blocks that raise flags: before it waits for any header, it stages its
 *             rows at their receivers, in words that carry the epoch as those of headers do (comm/p2p_staged.cuh). Who
 *             waits for the blocks of the others takes such rows to where the headers say
 *   decode    in FP8: the rows of the other ranks into x (comm/ep_wire.h); neither where rows stay codes
 *   combine   raises partials_ready[this rank] at every rank, waits for those of all ranks, loads the partial rows of
 *             its own tokens from where they were made and sums them
 *
 * Why nothing is overwritten too early, with work of a rank in stream order:
 *   - A rank's header e says that it is through with everything before: x, ids and weights of e - 1 have been read, and
 *     its loads of other ranks' y of e - 1 have ended. Rows of e go out, and y of e is written, after all headers e.
 *   - Header e + 2 takes the place of header e, staged rows e + 2 that of staged rows e. A rank sends them after its
 *     own send of e + 1, which waits for headers e + 1 of all ranks: those leave when the ranks' sends of e, the last
 *     readers of headers and staged rows e, have ended.
 *   - Flags hold epochs that only grow; one that is ahead has passed the awaited one.
 * No kernel waits for a block of its own rank that may not be on the device yet: headers and what combine waits for
 * leave with the first block of every rank before it waits itself, or with a kernel before it, and the wait for rows is
 * the last block's to begin, when all others are there. So ranks whose processes take turns on one device get on,
 * slowly; and so do two exchanges on two streams of one process, which ranks may begin in a different order: beside the
 * blocks of one there is room for the first block of the other.
 *
 * A wait ends after timeout_ns, with the first fault of the communicator in its fault record. Counts that do not fit
 * and errors of a rank are known to all ranks from the same headers, and are every rank's fault in the same dispatch.
 * After a fault every kernel of the communicator returns at once, and dispatches bring no rows. */
#ifndef EPMOEI_P2P_H
#define EPMOEI_P2P_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EPMOEI_P2P_MAX_RANKS = 32,   /* a token's ranks are a word of bits */
    EPMOEI_P2P_MAX_BLOCKS = 256, /* of a send */
    EPMOEI_P2P_GROUP = 32,       /* tokens whose rows are counted together */
    EPMOEI_P2P_STAGED = 4,       /* a rank's tokens times ranks, up to which its rows are staged: one block does it */
};

/* A rank's window, at its addresses in this process. */
typedef struct epmoei_p2p_window_t {
    uint64_t *headers;        /* [2,R,R+2] by parity of the epoch, source, word: the epoch above, a value below */
    uint32_t *rows_there;     /* [R,MAX_BLOCKS] by source and its block */
    uint32_t *partials_ready; /* [R] by the rank whose partial rows they are */
    uint64_t *staged;         /* [2,R,staged_rows,staged_words] by parity of the epoch, source, its row for this rank */
    int32_t *ids;             /* [max_rows,k] */
    float *weights;           /* [max_rows,k] */
    char *x;                  /* [max_rows] of row_bytes, in FP8 the codes alone, codes_bytes a row */
    float *scales;            /* in FP8 [max_rows,scales_stride] */
    char *y;                  /* [max_rows] partial rows */
    int64_t capacity;         /* max_rows */
} epmoei_p2p_window_t;

/* Word 0 of a header: the rank's status, and from these bits on reuse_routing and how many blocks its send has, 0 where
 * its rows are staged. The other words: its rows for each rank, and max_rank_tokens. */
enum { EPMOEI_P2P_REUSE_BIT = 8, EPMOEI_P2P_BLOCKS_BIT = 16 };

/* This rank's own, on the device. */
typedef struct epmoei_p2p_state_t {
    uint32_t epoch;        /* of the last dispatch that ended */
    uint32_t route_blocks; /* that have ended, of the running kernel */
    uint32_t send_blocks;  /* that have begun, of the running kernel */
    int32_t num_tokens;    /* of the last dispatch */
    int32_t own_rows[2];   /* the first of this rank's rows here, and how many */
    int32_t counts[EPMOEI_P2P_MAX_RANKS];
} epmoei_p2p_state_t;

typedef enum epmoei_p2p_phase_t {
    EPMOEI_P2P_HEADERS = 1,
    EPMOEI_P2P_ROWS = 2,
    EPMOEI_P2P_PARTIALS = 3,
} epmoei_p2p_phase_t;

/* The first fault of a communicator, in host memory that the device addresses. */
typedef struct epmoei_p2p_fault_t {
    int32_t status; /* an epmoe_status_t, written last; OK = none */
    int32_t phase;
    int32_t peer;
    uint32_t epoch;
    int64_t value;      /* CAPACITY: rows; PEER: its status; MISMATCH: its value of the field */
    int64_t bound;      /* CAPACITY: rows that fit; MISMATCH: rank 0's value of the field */
    int32_t field;      /* MISMATCH: 0 reuse_routing, 1 max_rank_tokens */
    int64_t waited_ns;  /* TIMEOUT */
    int32_t host_stops; /* written by the host: waits shall end */
} epmoei_p2p_fault_t;

/* What the kernels take. */
typedef struct epmoei_p2p_args_t {
    const epmoei_p2p_window_t *windows; /* device [R] */
    epmoei_p2p_state_t *state;
    int32_t *failed;           /* device: not 0 after a fault of the communicator */
    epmoei_p2p_fault_t *fault; /* host */
    int64_t timeout_ns;
    int32_t rank, size;
    int32_t num_experts, top_k, hidden;
    int32_t width;     /* most ranks of a token */
    int64_t row_bytes; /* of x */
    int32_t coded;     /* rows travel in FP8 */
    int32_t keeps;     /* and stay so here */
    int64_t codes_bytes, scales_stride;
    int64_t staged_rows, staged_words; /* of a source; of a row */
    void *own_x;                       /* in FP8 [max_rows] of row_bytes: decoded rows, those of the own rank at once */
    uint32_t *token_ranks;  /* [max_tokens, rounded up to whole groups] bit r: the token has a row for rank r */
    int32_t *group_offsets; /* [R,groups] rows for a rank before a group */
    int64_t groups;         /* of max_tokens */
    int32_t *token_rows;    /* [max_tokens,width] the token's row at each of its ranks, ascending */
    int32_t *num_rows;      /* [1] */
    int32_t *error_word;    /* counts bad ids; may be NULL */
    /* of a dispatch */
    int32_t local_status; /* not OK: this rank takes part without tokens, and all ranks learn why */
    int32_t reuse_routing;
    int32_t max_rank_tokens;
    int32_t num_tokens;
    const int32_t *num_tokens_dev; /* or NULL */
    const void *x;
    const int32_t *ids;
    const float *weights;
    /* of a combine; sum_tokens 0: only for the peers */
    int32_t sum_tokens; /* the host's bound */
    epmoe_dtype_t dtype, partial_dtype;
    const float *shared;
    const void *residual;
    void *y;
    int32_t num_sms;     /* of the device */
    int32_t max_blocks;  /* multiprocessors to be used, at most MAX_BLOCKS */
    int32_t send_blocks; /* set by the launcher */
} epmoei_p2p_args_t;

/* Enqueue, nothing else. */
epmoe_status_t epmoei_p2p_dispatch_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_p2p_combine_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
