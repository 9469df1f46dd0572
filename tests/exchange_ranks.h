/* What the programs have in common that tests start under mpirun to exchange rows. A requirement that does not hold is
 * a line on stderr, and ends all ranks with exit code 3. */
#ifndef EPMOE_EXCHANGE_RANKS_H
#define EPMOE_EXCHANGE_RANKS_H

#include "tests/exchange_case.h"

/* MPI_Init; this rank and the number of ranks. */
void exchange_start(int *argc, char ***argv, int32_t *rank, int32_t *size);

void exchange_must(epmoe_status_t status);
void exchange_expect(bool condition, const char *what);
/* The call `what` failed as it must, with these words (NULL: any) in its message. */
void exchange_must_fail(epmoe_status_t status, epmoe_status_t expected, const char *words, const char *what);

/* The transport of that name. */
epmoe_transport_t exchange_transport(const char *name);
/* A communicator of all ranks; timeout_s 0 = default. */
epmoe_comm_t *exchange_comm(epmoe_backend_t backend, epmoe_transport_t transport, double timeout_s);

/* Exchanges rows until rank 1 stops ("stop"), dies ("kill") or leaves ("absent") in the middle, or, where all are
 * "healthy", until something else is wrong. Every other rank prints the error that it got and after what time, whether
 * it was in time, and what a further call gives; then all end. */
void exchange_fault(const char *kind, epmoe_backend_t backend, epmoe_transport_t transport, double timeout_s);

#endif
