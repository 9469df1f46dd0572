/* cblas_sgemm from inside OpenMP regions. An OpenBLAS built on OpenMP runs such calls on the calling thread by itself;
 * one built on pthreads would start its own threads under each of ours, so its thread count, which is process-wide, is
 * held at 1 while any region is open and restored when the last one closes. */
#ifndef EPMOEI_BLAS_THREADS_H
#define EPMOEI_BLAS_THREADS_H

void epmoei_blas_region_begin(void);
void epmoei_blas_region_end(void);

#endif
