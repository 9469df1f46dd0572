"""The layer: configs, checkpoints, communicators, forward."""

import ctypes

from . import _abi
from ._library import check, library, mpi_library
from .ops import fill, integer, require
from .tensor import CPU, CUDA, as_tensor, empty, named_tensor, resolved

_TRANSPORTS = {"auto": 0, "local": 1, "mpi": 2, "nccl": 3, "p2p": 4}
_NAMES = {_abi.EPMOE_F32: "float32", _abi.EPMOE_BF16: "bfloat16", _abi.EPMOE_F16: "float16", 0: "bfloat16"}
_BACKENDS = {"auto": 0, CPU: _abi.EPMOE_BACKEND_CPU, CUDA: _abi.EPMOE_BACKEND_CUDA}


def config(**fields):
    """An epmoe_layer_config_t with these fields; enums and dtypes by their names. A placement is an argument of Layer."""
    result = _abi.epmoe_layer_config_t()
    fill(result, fields)
    return result


def presets():
    """The names of the public models whose shapes the library knows."""
    names, i = [], 0
    while True:
        name = library.epmoe_preset_name(i)
        if name is None:
            return names
        names.append(name.decode())
        i += 1


def preset(name, **fields):
    """The config of a public model's MoE block, with these fields changed."""
    result = config()
    check(library.epmoe_preset_config(name.encode(), ctypes.byref(result)))
    fill(result, fields)
    return result


def expert_range(num_experts, size, rank):
    """(first, count): the experts of rank `rank` of `size`."""
    first, count = ctypes.c_int32(), ctypes.c_int32()
    num_experts, size, rank = integer("num_experts", num_experts), integer("size", size), integer("rank", rank)
    check(library.epmoe_expert_range(num_experts, size, rank, ctypes.byref(first), ctypes.byref(count)))
    return first.value, count.value


def placement_plan(load, num_physical, size):
    """int32 [num_physical]: where the experts and their copies go on `size` ranks, for a load int64 [num_experts] such as
    the expert_load of Layer.forward, summed over the ranks."""
    load = named_tensor("load", load)
    num_physical, size = integer("num_physical", num_physical), integer("size", size)
    require(load, load.shape[:1] or (1,), "int64", CPU, "load", False)
    if num_physical < 1:
        raise ValueError(f"num_physical is {num_physical}: expected at least 1")
    placement = empty((num_physical,), "int32", CPU)
    check(library.epmoe_placement_plan(load.pointer, load.shape[0], num_physical, size, placement.pointer))
    return placement


class _Handle:
    """Owns a handle of the library; close() or the end of a `with` block destroys it."""

    _destroy = None

    def __init__(self):
        self._handle = ctypes.c_void_p()

    @property
    def handle(self):
        """What C takes; an error once it is closed, since NULL means something else to it."""
        if not self._handle:
            raise ValueError(f"the {type(self).__name__} is closed")
        return self._handle

    def close(self):
        handle, self._handle = getattr(self, "_handle", None), ctypes.c_void_p()
        if handle:
            type(self)._destroy(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


class Comm(_Handle):
    """The ranks of one expert-parallel group. Without `mpi` one rank alone; mpi=True: those of MPI_COMM_WORLD, and MPI
    is started if nobody has; or a communicator of mpi4py. Collective over these ranks."""

    _destroy = library.epmoe_comm_destroy

    def __init__(self, backend="auto", transport="auto", *, device=-1, timeout_s=0.0, mpi=None):
        super().__init__()
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport is '{transport}': expected one of {', '.join(_TRANSPORTS)}")
        if backend not in _BACKENDS:
            raise ValueError(f"backend is '{backend}': expected one of {', '.join(_BACKENDS)}")
        settings = _abi.epmoe_comm_config_t()
        fill(settings, {"device": device, "timeout_s": timeout_s, "transport": _TRANSPORTS[transport],
                        "backend": _BACKENDS[backend]})
        if mpi is None or mpi is False:
            check(library.epmoe_comm_create(None, ctypes.byref(settings), ctypes.byref(self._handle)))
        else:
            create = mpi_library()
            create.epmoe_comm_create_mpi.argtypes = None
            check(create.epmoe_comm_create_mpi(_mpi_handle(create, mpi), ctypes.byref(settings),
                                               ctypes.byref(self._handle)))
        self.device = resolved(backend)

    @property
    def rank(self):
        return library.epmoe_comm_rank(self.handle)

    @property
    def size(self):
        return library.epmoe_comm_size(self.handle)

    @property
    def transport(self):
        return library.epmoe_transport_string(library.epmoe_comm_transport(self.handle)).decode()


def _mpi_handle(mpi, communicator):
    """MPI_Comm as C passes it: an address in Open MPI, an int in MPICH and its relatives."""
    if communicator is not True:
        from mpi4py import MPI
        kind = ctypes.c_void_p if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_int
        return kind.from_address(MPI._addressof(communicator))
    started = ctypes.c_int()
    mpi.MPI_Initialized(ctypes.byref(started))
    if not started.value:
        import atexit
        mpi.MPI_Init(None, None)
        atexit.register(mpi.MPI_Finalize)
    try:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
    except ValueError:
        return ctypes.c_int(0x44000000)


class Checkpoint(_Handle):
    """A folder of safetensors. Everything but the values of its tensors is checked when it is opened."""

    _destroy = library.epmoe_checkpoint_close

    def __init__(self, folder):
        super().__init__()
        check(library.epmoe_checkpoint_open(str(folder).encode(), ctypes.byref(self._handle)))
        about = _abi.epmoe_checkpoint_info_t()
        fill(about, {})
        check(library.epmoe_checkpoint_get_info(self._handle, ctypes.byref(about)))
        self.family, self.num_layers, self.hidden = about.family.decode(), about.num_layers, about.hidden
        self.num_experts, self.num_shards, self.total_bytes = about.num_experts, about.num_shards, about.total_bytes

    def layer_config(self, layer, **fields):
        result = config()
        check(library.epmoe_checkpoint_layer_config(self.handle, layer, ctypes.byref(result)))
        fill(result, fields)
        return result


def _weight_shapes(config, comm):
    """What set_weights takes by name: shape, and the dtypes of plain tensors."""
    d, f, shared, experts = config.hidden, config.intermediate, config.shared_intermediate, config.num_experts
    physical = config.num_physical or experts
    local = expert_range(physical, comm.size, comm.rank)[1] if comm else physical
    own, any_float, single = (_NAMES[config.dtype],), ("float32", "bfloat16", "float16"), ("float32",)
    return {"router": ((experts, d), any_float), "router_bias": ((experts,), single),
            "selection_bias": ((experts,), single), "gate_up": ((local, 2 * f, d), own), "down": ((local, d, f), own),
            "gate_up_bias": ((local, 2 * f), single), "down_bias": ((local, d), single),
            "shared_gate_up": ((2 * shared, d), own), "shared_down": ((d, shared), own), "shared_gate": ((d,), any_float)}


class Layer(_Handle):
    """A MoE block: router, dispatch, experts, combine, shared expert. Collective over the communicator's ranks; without
    one a rank alone, on the backend that `auto` is. placement: int32 tensor on the CPU, the same on all ranks: the expert
    of which each physical expert is a copy. set_weights then takes the weights of this rank's physical experts."""

    _destroy = library.epmoe_layer_destroy

    def __init__(self, config, comm=None, *, placement=None):
        super().__init__()
        self._comm = comm  # must outlive the layer
        if placement is not None:
            placement, config = named_tensor("placement", placement), type(config).from_buffer_copy(config)
            require(placement, placement.shape[:1] or (1,), "int32", CPU, "placement", False)
            fill(config, {"placement": placement, "num_physical": placement.shape[0]})
        self.device = comm.device if comm else resolved("auto")
        if config.dtype not in _NAMES:
            raise ValueError(f"config.dtype is {config.dtype}: expected float32, bfloat16 or float16")
        self.hidden, self.num_experts, self.top_k = config.hidden, config.num_experts, config.top_k
        self.dtype = _NAMES[config.dtype]
        self._shapes = _weight_shapes(config, comm)
        check(library.epmoe_layer_create(ctypes.byref(config), comm.handle if comm else None,
                                         ctypes.byref(self._handle)))

    def load(self, checkpoint, layer):
        """Layer `layer` of a Checkpoint: this rank's experts, the router, the shared expert."""
        check(library.epmoe_layer_load_checkpoint(self.handle, checkpoint.handle, layer, None))

    def set_random_weights(self, seed=1):
        check(library.epmoe_layer_set_random_weights(self.handle, seed))

    def set_weights(self, **tensors):
        """The fields of epmoe_layer_weights_t: router, gate_up, down, ... Copied into the layer's own layout."""
        weights = _abi.epmoe_layer_weights_t()
        for name, value in tensors.items():
            if name in self._shapes and not isinstance(value, _abi.epmoe_weight_t) and value is not None:
                tensor, (shape, dtypes) = named_tensor(name, value), self._shapes[name]
                require(tensor, shape, tensor.dtype if tensor.dtype in dtypes else dtypes[0], tensor.device, name, False)
        if "router" in tensors and "router_dtype" not in tensors:
            tensors["router_dtype"] = as_tensor(tensors["router"]).dtype
        kept = fill(weights, tensors)
        check(library.epmoe_layer_set_weights(self.handle, ctypes.byref(weights)))
        del kept

    def forward(self, x, *, out=None, residual=None, logits=None, logits_out=None, ids_out=None, weights_out=None,
                num_tokens_dev=None, max_rank_tokens=0, expert_load=None, stream=None):
        """y [T,hidden] of x [T,hidden], both of the layer's dtype. expert_load, int64 [num_experts]: the number of slots
        that chose each expert is added to it. On CUDA it only enqueues on `stream`, and the tensors must live until it
        has run."""
        x = as_tensor(x, stream)
        tokens = x.shape[0] if x.shape else 0
        require(x, (tokens, self.hidden), self.dtype, self.device, "x", False)
        out = empty(x.shape, self.dtype, self.device) if out is None else out
        y = as_tensor(out)
        require(y, x.shape, self.dtype, self.device, "out")
        routed, chosen = (tokens, self.num_experts), (tokens, self.top_k)
        for name, value, shape, dtype, written in (
                ("residual", residual, x.shape, x.dtype, False), ("logits", logits, routed, "float32", False),
                ("logits_out", logits_out, routed, "float32", True), ("ids_out", ids_out, chosen, "int32", True),
                ("weights_out", weights_out, chosen, "float32", True),
                ("expert_load", expert_load, (self.num_experts,), "int64", True)):
            if value is not None:
                require(as_tensor(value, stream), shape, dtype, self.device, name, written)
        args = _abi.epmoe_forward_args_t()
        kept = fill(args, {"num_tokens": tokens, "max_rank_tokens": max_rank_tokens, "x": x, "y": y,
                           "residual": residual, "num_tokens_dev": num_tokens_dev, "logits": logits,
                           "logits_out": logits_out, "ids_out": ids_out, "weights_out": weights_out,
                           "expert_load": expert_load}, stream)
        check(library.epmoe_layer_forward_args(self.handle, ctypes.byref(args), stream))
        del kept
        return out
