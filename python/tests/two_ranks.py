"""A layer over the ranks of mpirun equals the one of a rank alone."""

import array
import math
import sys

import epmoe

config = epmoe.config(hidden=64, intermediate=32, num_experts=10, top_k=3, renormalize=1, dtype="float32", max_tokens=5)


def run(comm, x):
    with epmoe.Layer(config, comm) as layer:
        layer.set_random_weights(1)
        return [value for row in layer.forward(x).tolist() for value in row]


with epmoe.Comm("cpu", mpi=True) as comm, epmoe.Comm("cpu") as alone:
    values = epmoe.as_tensor(array.array("f", [math.sin(i + 1000 * comm.rank) for i in range(5 * 64)]))
    x = epmoe.Tensor((5, 64), values.dtype, values.device, values.pointer, values)
    spread, single = run(comm, x), run(alone, x)
    error = math.dist(spread, single) / math.hypot(*single)
    good = comm.size == 2 and error <= 1e-5
    print(f"rank {comm.rank} of {comm.size}, {comm.transport}: relative error {error:.1e}: {'ok' if good else 'WRONG'}")
sys.exit(0 if good else 1)
