#include "kernels/blas_threads.h"

#include <cblas.h>
#include <pthread.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int open_regions;
static int saved_threads;

void epmoei_blas_region_begin(void)
{
    if (openblas_get_parallel() != OPENBLAS_THREAD) return;
    pthread_mutex_lock(&mutex);
    if (open_regions++ == 0) {
        saved_threads = openblas_get_num_threads();
        if (saved_threads != 1) openblas_set_num_threads(1);
    }
    pthread_mutex_unlock(&mutex);
}

void epmoei_blas_region_end(void)
{
    if (openblas_get_parallel() != OPENBLAS_THREAD) return;
    pthread_mutex_lock(&mutex);
    if (--open_regions == 0 && saved_threads != 1) openblas_set_num_threads(saved_threads);
    pthread_mutex_unlock(&mutex);
}
