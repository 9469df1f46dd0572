/* --plot: the lines of this run, drawn by moe_layer_plot.py, which lies beside the program. */
#ifndef EPMOE_BENCH_PLOT_H
#define EPMOE_BENCH_PLOT_H

#include "bench/bench.h"

/* Rank 0: a file for the lines, bench->plot; NOT_SUPPORTED where nothing could draw them, before anything is measured.
 * Nothing without --plot. */
epmoe_status_t plot_begin(bench_t *bench);
/* Draws them when `good`, and ends what plot_begin began. */
epmoe_status_t plot_end(bench_t *bench, bool good);

#endif
