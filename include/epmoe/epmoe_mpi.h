/* epmoe over MPI: the only header that needs mpi.h. Link libepmoe_mpi beside libepmoe.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EPMOE_EPMOE_MPI_H
#define EPMOE_EPMOE_MPI_H

#include <epmoe/epmoe.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A communicator over the ranks of an MPI communicator. Collective; MPI must be initialised, and stay so until the
 * communicator is destroyed. `mpi_comm` is duplicated, so that no message of the library meets one of the caller's, and
 * errors on the duplicate are returned, never fatal. The library calls MPI only from within its own calls, on the
 * calling thread: MPI_THREAD_SINGLE is enough for a program with one thread, MPI_THREAD_SERIALIZED otherwise.
 * config NULL = defaults. Waits are polled and end within config->timeout_s, those of the duplication and those of the
 * creation each. Ranks may outnumber cores: a waiting rank gives its core away.
 * SIGPIPE, which MPI's sockets raise when a peer has died, is held back in the calling thread during a call and
 * dropped. After a timeout or a dead peer MPI_Finalize may wait for that peer for ever: end such a program with
 * MPI_Abort. Errors: as epmoe_comm_create; INVALID_ARGUMENT for MPI_COMM_NULL; BAD_STATE before MPI_Init or after
 * MPI_Finalize. */
EPMOE_API epmoe_status_t epmoe_comm_create_mpi(MPI_Comm mpi_comm, const epmoe_comm_config_t *config,
                                               epmoe_comm_t **comm);

/* Fills a bootstrap whose callbacks use MPI, for programs that change one of them. Collective. On success the caller
 * owns it until epmoe_comm_create takes it; `timeout_s` bounds the duplication (0 = 30). */
EPMOE_API epmoe_status_t epmoe_bootstrap_create_mpi(MPI_Comm mpi_comm, double timeout_s, epmoe_bootstrap_t *bootstrap);

#ifdef __cplusplus
}
#endif

#endif /* EPMOE_EPMOE_MPI_H */
