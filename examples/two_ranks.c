/* One MoE layer whose experts are spread over the ranks of an MPI program, compared with the same layer on one rank.
 *
 *     mpicc -std=c11 two_ranks.c -o two_ranks $(pkg-config --cflags --libs epmoe_mpi) -lm
 *     mpirun -np 2 ./two_ranks
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <epmoe/epmoe_mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 64, INTERMEDIATE = 32, EXPERTS = 10, TOP_K = 3, TOKENS = 5 };

/* Makes the layer on a communicator, fills it and runs it once. The random weights depend on the seed
 * and the expert alone, so that every rank count has the same ones. */
static epmoe_status_t run(epmoe_comm_t *comm, const float *x, float *y)
{
    epmoe_layer_t *layer = NULL;
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = HIDDEN;
    config.intermediate = INTERMEDIATE;
    config.num_experts = EXPERTS;
    config.top_k = TOP_K;
    config.renormalize = 1;
    config.dtype = EPMOE_F32;
    config.max_tokens = TOKENS;

    epmoe_status_t status = epmoe_layer_create(&config, comm, &layer);
    if (status == EPMOE_OK) status = epmoe_layer_set_random_weights(layer, 1);
    if (status == EPMOE_OK) status = epmoe_layer_forward(layer, x, y, TOKENS, NULL);
    epmoe_layer_destroy(layer);
    return status;
}

int main(int argc, char **argv)
{
    epmoe_comm_t *comm = NULL, *own = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = EPMOE_BACKEND_CPU; /* the arrays are host memory */
    float x[TOKENS * HIDDEN], spread[TOKENS * HIDDEN], alone[TOKENS * HIDDEN];
    MPI_Init(&argc, &argv);

    epmoe_status_t status = epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm);
    if (status == EPMOE_OK) status = epmoe_comm_create(NULL, &config, &own);
    if (status != EPMOE_OK) goto fail;
    const int32_t rank = epmoe_comm_rank(comm), size = epmoe_comm_size(comm);
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = sinf((float)(i + 1000 * rank));

    status = run(comm, x, spread);
    if (status == EPMOE_OK) status = run(own, x, alone);
    if (status != EPMOE_OK) goto fail;

    double error = 0.0, norm = 0.0;
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        error += pow((double)spread[i] - (double)alone[i], 2);
        norm += pow((double)alone[i], 2);
    }
    error = sqrt(error / norm);
    int32_t first = 0, count = 0;
    epmoe_expert_range(EXPERTS, size, rank, &first, &count);
    const int ok = error <= 1e-5; /* false for a NaN */
    printf("rank %d of %d: %d experts from %d, %s, relative error %.1e: %s\n", rank, size, count, first,
           epmoe_transport_string(epmoe_comm_transport(comm)), error, ok ? "ok" : "WRONG");
    epmoe_comm_destroy(own);
    epmoe_comm_destroy(comm);
    MPI_Finalize();
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;

fail:
    fprintf(stderr, "epmoe: %s\n", epmoe_last_error());
    epmoe_comm_destroy(own);
    epmoe_comm_destroy(comm);
    /* After a timeout or a lost peer, MPI_Finalize could wait for that peer. */
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    return EXIT_FAILURE;
}
