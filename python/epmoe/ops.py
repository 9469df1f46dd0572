"""Ops on tensors: `run` calls any of them by name, the functions below it are the ones that a layer is made of."""

import ctypes

from . import _abi
from ._library import check, library
from .tensor import CPU, CUDA, as_tensor, dtype_number, empty, named_tensor

_BACKENDS = {CPU: _abi.EPMOE_BACKEND_CPU, CUDA: _abi.EPMOE_BACKEND_CUDA}
SCORING = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "topk_softmax": 3, "sparse_mixer": 4}
GROUP_SCORE = {"top2": 0, "max": 1}
ACTIVATION = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3, "none": 4, "sigmoid": 5}
_WORDS = {"scoring": SCORING, "group_score": GROUP_SCORE, "activation": ACTIVATION}
_PLAIN = {"float32": _abi.EPMOE_FORMAT_F32, "bfloat16": _abi.EPMOE_FORMAT_BF16, "float16": _abi.EPMOE_FORMAT_F16}
# Functions whose structs do not have their own name.
_STRUCTS = {"align_block_size": "align", "align_workspace_size": "align"}


def _word(field, value):
    words = _WORDS[field]
    if value not in words:
        raise ValueError(f"{field} is '{value}': expected one of {', '.join(words)}")
    return words[value]


def plain_weight(weight, stream=None):
    """(epmoe_weight_t, what to keep) of a weight that is not quantised: [E,N,K] or [N,K]."""
    tensor = as_tensor(weight, stream)
    if tensor.dtype not in _PLAIN:
        raise TypeError(f"a weight has dtype {tensor.dtype}: expected one of {', '.join(_PLAIN)}, or an epmoe_weight_t")
    out = _abi.epmoe_weight_t(struct_size=ctypes.sizeof(_abi.epmoe_weight_t), format=_PLAIN[tensor.dtype],
                              data=tensor.pointer)
    return out, tensor


_BITS = {ctypes.c_int32: 32, ctypes.c_int64: 64}


def integer(name, value, bits=32):
    """`value`, or ValueError where C's integer of so many bits would be another number."""
    if isinstance(value, float) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}: expected an integer")
    value = value.__index__()
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{name} is {value}: expected {bits} bits")
    return value


def fill(struct, fields, stream=None):
    """Sets fields of a struct of _abi by name: tensors give their address, words their number, dtypes too. Returns the
    tensors, which must live until the struct has been used."""
    kept = []
    types = dict(struct._fields_)
    for name, value in fields.items():
        if value is None:
            continue
        if name not in types:
            raise TypeError(f"{type(struct).__name__} has no field '{name}': it has {', '.join(types)}")
        if types[name] is _abi.epmoe_weight_t and not isinstance(value, _abi.epmoe_weight_t):
            value, tensor = plain_weight(value, stream)
            kept.append(tensor)
        elif types[name] is ctypes.c_void_p and not isinstance(value, int):
            tensor = named_tensor(name, value, stream)
            kept.append(tensor)
            value = tensor.pointer
        elif isinstance(value, str):
            if name not in _WORDS and not name.endswith("dtype"):
                raise TypeError(f"{name} is '{value}': expected a number")
            value = _word(name, value) if name in _WORDS else dtype_number(value)
        if types[name] in _BITS and name != "struct_size":
            value = integer(name, value, _BITS[types[name]])
        setattr(struct, name, value)
    if hasattr(struct, "struct_size"):
        struct.struct_size = ctypes.sizeof(struct)
    return kept


def run(op, *, stream=None, **fields):
    """Any op of epmoe.h by the name of its function and the fields of its struct, for example

        epmoe.run("silu_and_mul", num_tokens=4, width=8, dtype="float32", x=x, y=y)

    The fields are C's: sizes, dtypes and shapes of tensors are not compared with them, and what an op writes must be
    memory that can be written. The backend is that of the tensors, scratch memory is taken where the op needs some. On CUDA the call only enqueues
    on `stream` (an address; None is the default stream); tensors that it uses must live until it has run.
    """
    struct = getattr(_abi, f"epmoe_{_STRUCTS.get(op, op)}_args_t", None)
    if struct is None or f"epmoe_{op}" not in _abi.FUNCTIONS:
        raise ValueError(f"there is no op '{op}'")
    args = struct()
    kept = fill(args, fields, stream)
    devices = {tensor.device for tensor in kept}
    if len(devices) > 1:
        raise ValueError(f"the tensors of {op} lie on the CPU and on CUDA: expected one of the two")
    device = devices.pop() if devices else CPU
    if hasattr(args, "backend") and not args.backend:
        args.backend = _BACKENDS[device]
    size_of = getattr(library, f"epmoe_{_STRUCTS.get(op, op)}_workspace_size", None)
    if hasattr(args, "workspace") and size_of is not None and not args.workspace:
        size = ctypes.c_int64()
        check(size_of(ctypes.byref(args), ctypes.byref(size)))
        scratch = empty((size.value,), "uint8", device)
        args.workspace, args.workspace_bytes = scratch.pointer, size.value
        kept.append(scratch)
    function = getattr(library, f"epmoe_{op}")
    check(function(ctypes.byref(args), stream) if len(function.argtypes) == 2 else function(ctypes.byref(args)))


def _output(out, shape, dtype, device, name):
    if out is None:
        return empty(shape, dtype, device)
    require(as_tensor(out), shape, dtype, device, name)
    return out


def require(tensor, shape, dtype, device, name, written=True):
    """ValueError unless the tensor has this shape and dtype, lies there, and can be written if it is."""
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(f"{name} is {tensor}: expected shape {tuple(shape)}, {dtype}, on {device}")
    if written and tensor.readonly:
        raise ValueError(f"{name} is read-only")


def _matrix(tensor, name):
    if len(tensor.shape) != 2:
        raise ValueError(f"{name} has shape {tensor.shape}: expected two dimensions")
    return tensor.shape


def topk(logits, k, *, scoring="softmax", selection_bias=None, renormalize=False, scale=1.0, n_group=1, topk_group=0,
         group_score="top2", out=(None, None), stream=None):
    """The router: (ids int32 [T,k], weights float32 [T,k]) of logits [T,E]. See epmoe_topk_args_t for the rules."""
    logits = named_tensor("logits", logits, stream)
    tokens, experts = _matrix(logits, "logits")
    k = integer("k", k)
    if k < 1:
        raise ValueError(f"k is {k}: expected at least 1")
    out = out or (None, None)
    if selection_bias is not None:
        require(as_tensor(selection_bias, stream), (experts,), "float32", logits.device, "selection_bias", False)
    ids = _output(out[0], (tokens, k), "int32", logits.device, "out[0]")
    weights = _output(out[1], (tokens, k), "float32", logits.device, "out[1]")
    run("topk", stream=stream, num_tokens=tokens, num_experts=experts, top_k=k, logits_dtype=logits.dtype, logits=logits,
        selection_bias=selection_bias, scoring=scoring, renormalize=int(renormalize), scale=scale, n_group=n_group,
        topk_group=topk_group, group_score=group_score, ids=ids, weights=weights)
    return ids, weights


def align(ids, num_experts, block_size=1, *, expert_map=None, stream=None):
    """Slots sorted by expert: (sorted_ids [P], expert_ids [P/block_size], num_post_padded [1]), all int32."""
    ids = named_tensor("ids", ids, stream)
    tokens, k = _matrix(ids, "ids")
    num_experts, block_size = integer("num_experts", num_experts), integer("block_size", block_size)
    if num_experts < 1 or block_size < 1:
        raise ValueError(f"num_experts is {num_experts} and block_size {block_size}: expected at least 1")
    require(ids, ids.shape, "int32", ids.device, "ids", False)
    if expert_map is not None:
        require(as_tensor(expert_map, stream), (num_experts,), "int32", ids.device, "expert_map", False)
    padded = library.epmoe_align_max_padded(tokens, k, num_experts, block_size)
    if padded < 0:
        raise ValueError(f"{tokens} tokens, top {k}, {num_experts} experts in blocks of {block_size} are too many")
    result = [empty((size,), "int32", ids.device) for size in (padded, padded // block_size, 1)]
    run("align_block_size", stream=stream, num_tokens=tokens, top_k=k, num_experts=num_experts, block_size=block_size,
        ids=ids, expert_map=expert_map, sorted_ids=result[0], expert_ids=result[1], num_post_padded=result[2])
    return tuple(result)


def experts(x, ids, weights, w13, w2, *, b13=None, b2=None, activation="silu", alpha=0.0, limit=0.0,
            weight_on_input=False, residual=None, out=None, stream=None):
    """The routed experts for given routing: y [T,d] of x [T,d], ids int32 and weights float32 [T,k], w13 [E,2f,d] gate
    rows first, w2 [E,d,f], of one dtype. Quantised weights: epmoe.run("experts", ...) with epmoe_weight_t."""
    x, ids, weights, w13, w2 = (named_tensor(name, source, stream) for name, source in
                                (("x", x), ("ids", ids), ("weights", weights), ("w13", w13), ("w2", w2)))
    tokens, hidden = _matrix(x, "x")
    if len(w13.shape) != 3 or w13.shape[1] % 2:
        raise ValueError(f"w13 is {w13}: expected shape (E, 2f, {hidden})")
    shape = w13.shape
    require(w13, (shape[0], shape[1], hidden), w13.dtype, x.device, "w13", False)
    require(w2, (shape[0], hidden, shape[1] // 2), w13.dtype, x.device, "w2", False)
    require(ids, (tokens, _matrix(ids, "ids")[1]), "int32", x.device, "ids", False)
    require(weights, ids.shape, "float32", x.device, "weights", False)
    for name, bias, size in (("b13", b13, shape[1]), ("b2", b2, hidden)):
        if bias is not None:
            require(named_tensor(name, bias, stream), (shape[0], size), "float32", x.device, name, False)
    if residual is not None:
        require(as_tensor(residual, stream), x.shape, x.dtype, x.device, "residual", False)
    out = _output(out, (tokens, hidden), x.dtype, x.device, "out")
    run("experts", stream=stream, num_tokens=tokens, top_k=ids.shape[1], num_experts=shape[0], hidden=hidden,
        intermediate=shape[1] // 2, dtype=x.dtype, x=x, ids=ids, weights=weights, gate_up=w13, down=w2,
        gate_up_bias=b13, down_bias=b2, activation=activation, alpha=alpha, limit=limit,
        weight_on_input=int(weight_on_input), residual=residual, y=out)
    return out
