"""A layer over the ranks of mpirun equals the one of a rank alone."""

import array
import math
import sys

import epmoe

config = epmoe.config(hidden=64, intermediate=32, num_experts=10, top_k=3, renormalize=1, dtype="float32", max_tokens=5)


def integers(values):
    return epmoe.as_tensor(array.array("q", values))


def run(comm, x, load=None, placement=None):
    with epmoe.Layer(config, comm, placement=placement) as layer:
        layer.set_random_weights(1)
        return [value for row in layer.forward(x, expert_load=load).tolist() for value in row]


with epmoe.Comm("cpu", mpi=True) as comm, epmoe.Comm("cpu") as alone:
    values = epmoe.as_tensor(array.array("f", [math.sin(i + 1000 * comm.rank) for i in range(5 * 64)]))
    x = epmoe.Tensor((5, 64), values.dtype, values.device, values.pointer, values)
    load = integers([0] * 10)
    spread, single = run(comm, x), run(alone, x, load)
    error = math.dist(spread, single) / math.hypot(*single)
    # Every rank must have the same placement: this one is planned for what is the same on all.
    placed = run(comm, x, placement=epmoe.placement_plan(integers([9, 1, 1, 1, 1, 1, 1, 1, 1, 30]), 13, 2))
    error = max(error, math.dist(placed, single) / math.hypot(*single))
    good = comm.size == 2 and error <= 1e-5 and sum(load.tolist()) == 15
    print(f"rank {comm.rank} of {comm.size}, {comm.transport}: relative error {error:.1e}: {'ok' if good else 'WRONG'}")
sys.exit(0 if good else 1)
