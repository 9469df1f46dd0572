#include "dense_layers/paged_batch.h"

#include "kernels/op_check.h"

static epmoe_status_t check_starts(const epmoei_paged_batch_t *batch)
{
    const int32_t *start = batch->query_start;
    if (start[0] != 0) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "query_start[0] is %d: expected 0", start[0]);
    for (int32_t b = 0; b < batch->num_seqs; b++)
        if (start[b + 1] < start[b])
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "query_start[%d] is %d: expected at least %d", b + 1,
                               start[b + 1], start[b]);
    if (start[batch->num_seqs] == batch->num_tokens) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "query_start[%d] is %d: expected num_tokens %d", batch->num_seqs,
                       start[batch->num_seqs], batch->num_tokens);
}

static epmoe_status_t check_seq(const epmoei_paged_batch_t *batch, int32_t b, int32_t num_positions, int32_t window)
{
    int64_t queries = batch->query_start[b + 1] - batch->query_start[b], length = batch->seq_lens[b];
    int64_t most = epmoei_min64((int64_t)batch->max_blocks * batch->block_size, num_positions);
    if (length == 0) return EPMOE_OK;
    if (length < queries || length > most)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "seq_lens[%d] is %lld: expected 0, or %lld (its new tokens) to %lld (max_blocks blocks, and "
                           "the %d positions)",
                           b, (long long)length, (long long)queries, (long long)most, num_positions);
    if (queries == 0) return EPMOE_OK;
    /* All that the attention reads, so that a wrong entry is found before the cache is written. */
    int64_t visible = window ? epmoei_max64(0, length - queries - window + 1) : 0;
    int64_t used = epmoei_ceil_div(length, batch->block_size), row = (int64_t)b * batch->max_blocks;
    for (int64_t i = visible / batch->block_size; i < used; i++) {
        int32_t block = batch->block_table[row + i];
        if (block < 0 || block >= batch->num_blocks)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "block_table[%d,%lld] is %d: expected 0 to %d", b,
                               (long long)i, block, batch->num_blocks - 1);
    }
    return EPMOE_OK;
}

static void fill_seq(const epmoei_paged_batch_t *batch, int32_t b)
{
    int64_t first = batch->query_start[b], last = batch->query_start[b + 1], length = batch->seq_lens[b];
    for (int64_t t = first; t < last; t++) {
        int64_t position = length ? length - (last - t) : 0;
        int64_t block = length ? batch->block_table[(int64_t)b * batch->max_blocks + position / batch->block_size] : 0;
        batch->positions[t] = position;
        batch->slots[t] = length ? block * batch->block_size + position % batch->block_size : -1;
    }
}

epmoe_status_t epmoei_paged_batch_fill(const epmoei_paged_batch_t *batch, int32_t num_positions, int32_t window)
{
    if (batch->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_range("num_seqs", batch->num_seqs, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("max_blocks", batch->max_blocks, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_blocks", batch->num_blocks, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_pointer("query_start", batch->query_start));
    EPMOEI_CHECK(epmoei_check_pointer("seq_lens", batch->seq_lens));
    EPMOEI_CHECK(epmoei_check_pointer("block_table", batch->block_table));
    EPMOEI_CHECK(check_starts(batch));
    for (int32_t b = 0; b < batch->num_seqs; b++) EPMOEI_CHECK(check_seq(batch, b, num_positions, window));
    for (int32_t b = 0; b < batch->num_seqs; b++) fill_seq(batch, b);
    return EPMOE_OK;
}
