"""epmoe from Python, over ctypes: the Mixture-of-Experts layer of large language models, its experts spread over GPUs or
CPUs. Nothing but the Python standard library is needed; tensors of torch, NumPy, CuPy and others go in and out without a
copy (see epmoe.tensor).

    import epmoe
    layer = epmoe.Layer(epmoe.preset("qwen3-30b-a3b", dtype="float32", max_tokens=16), epmoe.Comm("cpu"))
    layer.set_random_weights()
    y = layer.forward(x)                                  # x: float32 [T, 2048] of any framework
    ids, weights = epmoe.topk(logits, 8, renormalize=True)

SPDX-License-Identifier: Apache-2.0
"""

from . import _abi
from ._library import Error, library, version
from .layer import Checkpoint, Comm, Layer, config, expert_range, placement_plan, preset, presets
from .ops import align, experts, run, topk
from .tensor import Tensor, as_tensor, empty, resolved

STATUS = {name[6:]: value for name, value in vars(_abi).items() if name == "EPMOE_OK" or name.startswith("EPMOE_ERROR_")}
__version__ = ".".join(map(str, version()))
__all__ = ["Checkpoint", "Comm", "Error", "Layer", "STATUS", "Tensor", "align", "as_tensor", "config", "empty", "experts",
           "expert_range", "library", "placement_plan", "preset", "presets", "resolved", "run", "topk", "version"]
