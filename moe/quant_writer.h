/* Puts quantised matrices into packed memory of either backend. On the CPU rows are packed where they stay. For CUDA
 * they are packed on the host, W4 and MXFP4 are then tiled there, and the result is copied: the peak of a load is the
 * packed weights plus one matrix of one expert. */
#ifndef EPMOEI_QUANT_WRITER_H
#define EPMOEI_QUANT_WRITER_H

#include "moe/layer.h"

/* One expert's matrix in the packed memory. */
typedef struct epmoei_quant_matrix_t {
    const epmoei_pack_shape_t *pack;
    int64_t rows;
    int64_t cols;
    bool halves; /* gate and up rows */
    void *data;
    epmoei_pack_arrays_t arrays;
} epmoei_quant_matrix_t;

/* Whether CUDA kernels can compute on such a matrix: NULL, or why not. */
const char *epmoei_quant_cuda_obstacle(const epmoei_pack_shape_t *pack, int64_t cols);

typedef struct epmoei_quant_writer_t {
    epmoe_backend_t backend;
    epmoe_stream_t stream;
    epmoei_quant_matrix_t matrix; /* the one in hand */
    epmoei_pack_arrays_t rows;    /* CUDA: as the CPU packs it, FP8 with gate and up rows in turn */
    void *rows_data;
    void *rows_memory;
    int64_t rows_bytes;
    void *tiles_memory; /* CUDA: W4 and MXFP4 as the device has them */
    int64_t tiles_bytes;
} epmoei_quant_writer_t;

/* `stream` is the caller's; NULL on the CPU. */
void epmoei_quant_writer_open(epmoei_quant_writer_t *writer, epmoe_backend_t backend, epmoe_stream_t stream);
epmoe_status_t epmoei_quant_writer_begin(epmoei_quant_writer_t *writer, const epmoei_quant_matrix_t *matrix);
/* Where the rows of half 0 (gate rows, or all) or 1 (up rows) of the matrix in hand are packed to. */
epmoei_pack_target_t epmoei_quant_writer_target(const epmoei_quant_writer_t *writer, int half);
/* All rows are there. Waits for its copies. */
epmoe_status_t epmoei_quant_writer_end(epmoei_quant_writer_t *writer);
void epmoei_quant_writer_close(epmoei_quant_writer_t *writer);

#endif
