"""Tensors in and out: whatever speaks DLPack (torch, NumPy, CuPy, JAX), __cuda_array_interface__, __array_interface__ or
the buffer protocol goes in without a copy; what the package makes itself speaks the first three. Nothing of these has
to be installed.
"""

import ctypes
import math
import struct

from . import _abi
from ._library import check, library

CPU, CUDA = "cpu", "cuda"

#            (epmoe's number, DLPack's code, bits, kind of the array interfaces: None where they have no name for it)
_DTYPES = {
    "float32": (_abi.EPMOE_F32, 2, 32, "<f4"),
    "float16": (_abi.EPMOE_F16, 2, 16, "<f2"),
    "bfloat16": (_abi.EPMOE_BF16, 4, 16, None),
    "float8_e4m3": (_abi.EPMOE_F8_E4M3, 10, 8, None),
    "float8_e8m0": (_abi.EPMOE_F8_E8M0, 14, 8, None),
    "uint8": (_abi.EPMOE_U8, 1, 8, "|u1"),
    "int32": (_abi.EPMOE_I32, 0, 32, "<i4"),
    "int64": (_abi.EPMOE_I64, 0, 64, "<i8"),
}
_BY_DLPACK = {(code, bits): name for name, (_, code, bits, _) in _DTYPES.items()}
_BY_KIND = {kind: name for name, (_, _, _, kind) in _DTYPES.items() if kind}
_BY_FORMAT = {"f": "float32", "e": "float16", "B": "uint8", "i": "int32", "q": "int64", "l": "int64"}
_DEVICES = {1: CPU, 3: CPU, 2: CUDA, 13: CUDA}  # kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged


def dtype_number(name):
    """epmoe's number of a dtype's name."""
    if name not in _DTYPES:
        raise TypeError(f"dtype is {name}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name][0]


# ------------------------------------------------------------------------------------------------------------- DLPack

class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_python = ctypes.pythonapi
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_New.restype = ctypes.py_object
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_NAME, _USED = b"dltensor", b"used_dltensor"

_exported = {}  # address of an exported _DLManagedTensor: what keeps it alive


@_Deleter
def _forget(managed):
    _exported.pop(ctypes.addressof(managed.contents), None)


@_Destructor
def _destroy_capsule(capsule):
    # The capsule is being destroyed: only its address may be passed on. Used ones have another owner.
    if _python.PyCapsule_IsValid(ctypes.c_void_p(capsule), _NAME):
        _exported.pop(_python.PyCapsule_GetPointer(ctypes.c_void_p(capsule), _NAME), None)


class _Imported:
    """The owner of a tensor that came through DLPack."""

    def __init__(self, capsule):
        if not _python.PyCapsule_IsValid(ctypes.py_object(capsule), _NAME):
            raise TypeError("the object's __dlpack__ gives no capsule of the name 'dltensor'")
        address = _python.PyCapsule_GetPointer(ctypes.py_object(capsule), _NAME)
        self._managed = ctypes.cast(address, ctypes.POINTER(_DLManagedTensor))
        _python.PyCapsule_SetName(ctypes.py_object(capsule), _USED)
        self.tensor = self._managed.contents.tensor

    def __del__(self):
        managed = getattr(self, "_managed", None)
        if managed and managed.contents.deleter:
            managed.contents.deleter(managed)


def _from_dlpack(source, stream):
    device_type, _ = source.__dlpack_device__()
    on_device = _DEVICES.get(int(device_type)) == CUDA
    # The producer makes its work visible to `stream`; DLPack calls the default stream of the CUDA runtime 1.
    owner = _Imported(source.__dlpack__(stream=stream or 1) if on_device else source.__dlpack__())
    raw = owner.tensor
    device = _DEVICES.get(raw.device_type)
    dtype = _BY_DLPACK.get((raw.code, raw.bits))
    if device is None:
        raise TypeError(f"the tensor is on DLPack's device type {raw.device_type}: expected the CPU or CUDA")
    if dtype is None or raw.lanes != 1:
        raise TypeError(f"the tensor has DLPack's dtype code {raw.code} with {raw.bits} bits: expected one of "
                        f"{', '.join(_DTYPES)}")
    shape = tuple(raw.shape[i] for i in range(raw.ndim))
    strides = tuple(raw.strides[i] for i in range(raw.ndim)) if raw.strides else None
    return Tensor(shape, dtype, device, (raw.data or 0) + raw.byte_offset, owner, strides)


# --------------------------------------------------------------------------------------------------- array interfaces

def _from_interface(interface, device, owner):
    kind = interface["typestr"]
    dtype = _BY_KIND.get(kind)
    if dtype is None:
        raise TypeError(f"the array has typestr '{kind}': expected one of {', '.join(_BY_KIND)}; other dtypes go through "
                        "DLPack")
    size = _DTYPES[dtype][2] // 8
    strides = interface.get("strides")
    if strides and any(stride % size for stride in strides):
        raise ValueError(f"the array has strides of {strides} bytes: expected whole elements of {size}")
    pointer, readonly = interface["data"]
    return Tensor(tuple(interface["shape"]), dtype, device, pointer or 0, owner,
                  strides and tuple(stride // size for stride in strides), readonly)


def _from_buffer(source):
    view = memoryview(source)
    dtype = _BY_FORMAT.get(view.format.lstrip("@=<"))
    if dtype is None or _DTYPES[dtype][2] != 8 * view.itemsize:
        raise TypeError(f"the buffer has format '{view.format}': expected one of {', '.join(_BY_FORMAT)}")
    if not view.c_contiguous:
        raise ValueError("the buffer's elements do not lie side by side: expected a contiguous one")
    address = 0
    if view.nbytes:
        # A writable buffer gives its address; a read-only one is copied, which is enough for an input.
        kept = (ctypes.c_char * view.nbytes).from_buffer(view) if not view.readonly else \
            ctypes.create_string_buffer(view.tobytes(), view.nbytes)
        address, view = ctypes.addressof(kept), (view, kept)
    source = memoryview(source)
    return Tensor(tuple(source.shape), dtype, CPU, address, view, readonly=source.readonly)


def named_tensor(name, source, stream=None):
    """as_tensor, whose errors say which argument it was."""
    try:
        return as_tensor(source, stream)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


class Tensor:
    """Dense row-major memory with a shape and a dtype ("float32", "bfloat16", ...), on "cpu" or "cuda". It owns its
    memory, or keeps alive what does."""

    def __init__(self, shape, dtype, device, pointer, owner, strides=None, readonly=False):
        self.shape, self.dtype, self.device, self.pointer, self._owner = shape, dtype, device, pointer, owner
        self.readonly = readonly
        expected, step = [], 1
        for size in reversed(shape):
            expected.insert(0, step)
            step *= size
        if strides and self.size and any(size > 1 and given != dense
                                         for size, given, dense in zip(shape, strides, expected)):
            raise ValueError(f"a tensor of shape {shape} has strides {strides}: expected row-major {tuple(expected)}")

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def bytes(self):
        return self.size * _DTYPES[self.dtype][2] // 8

    def __repr__(self):
        return f"epmoe.Tensor({self.shape}, {self.dtype}, {self.device})"

    def tolist(self):
        """The elements of a tensor on the CPU, nested as its shape is; bfloat16 as floats."""
        if self.device != CPU:
            raise TypeError("the tensor is on cuda: expected one on the CPU")
        raw = ctypes.string_at(self.pointer, self.bytes) if self.bytes else b""
        if self.dtype == "bfloat16":
            raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
        formats = {"float32": "f", "bfloat16": "f", "float16": "e", "int32": "i", "int64": "q"}
        flat = list(struct.unpack(f"<{self.size}{formats.get(self.dtype, 'B')}", raw))
        for size in reversed(self.shape[1:]):
            flat = [flat[i:i + size] for i in range(0, len(flat), size)] if size else [[]] * math.prod(self.shape[:-1])
        return flat if self.shape else flat[0]

    def __dlpack_device__(self):
        return (1, 0) if self.device == CPU else (2, _device_of(self._owner))

    def __dlpack__(self, stream=None, **_):
        """Work of the library on a stream that is not the default one is the caller's to order."""
        if self.readonly:
            raise BufferError("the tensor is read-only, which DLPack cannot say")
        managed = _DLManagedTensor()
        shape = (ctypes.c_int64 * max(1, len(self.shape)))(*self.shape)
        raw = managed.tensor
        raw.data, raw.ndim, raw.shape, raw.lanes = self.pointer or None, len(self.shape), shape, 1
        raw.device_type, raw.device_id = self.__dlpack_device__()
        raw.code, raw.bits = _DTYPES[self.dtype][1:3]
        managed.deleter = _forget
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, self)
        return _python.PyCapsule_New(address, _NAME, _destroy_capsule)

    def _interface(self, version):
        kind = _DTYPES[self.dtype][3]
        if kind is None:
            raise AttributeError(f"the array interfaces have no {self.dtype}; DLPack has")
        return {"shape": self.shape, "typestr": kind, "data": (self.pointer, self.readonly), "strides": None,
                "version": version}

    @property
    def __array_interface__(self):
        if self.device != CPU:
            raise AttributeError("the tensor is on cuda")
        return self._interface(3)

    @property
    def __cuda_array_interface__(self):
        if self.device != CUDA:
            raise AttributeError("the tensor is on the CPU")
        return self._interface(3)


def as_tensor(source, stream=None):
    """A Tensor of the memory that `source` describes; nothing is copied, but for a read-only buffer. On CUDA the producer's work is made visible to
    `stream` (DLPack), or is the caller's to order."""
    if isinstance(source, Tensor):
        return source
    try:
        if hasattr(source, "__dlpack__"):
            return _from_dlpack(source, stream)
    except BufferError:  # NumPy does not export what is read-only
        pass
    for name, device in (("__cuda_array_interface__", CUDA), ("__array_interface__", CPU)):
        interface = getattr(source, name, None)
        if interface is not None:
            return _from_interface(interface, device, source)
    return _from_buffer(source)


# ------------------------------------------------------------------------------------------------------------- memory

class _DeviceMemory:
    """Memory of the current CUDA device, by the CUDA runtime that the process or the system has."""

    _runtime = None

    def __init__(self, size):
        cuda = _DeviceMemory._find()
        pointer, device = ctypes.c_void_p(), ctypes.c_int()
        if cuda.cudaGetDevice(ctypes.byref(device)) or cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
            raise MemoryError(f"no device memory: {size} bytes")
        self.pointer, self.device = pointer.value, device.value

    def __del__(self):
        if getattr(self, "pointer", None):
            _DeviceMemory._runtime.cudaFree(ctypes.c_void_p(self.pointer))

    @classmethod
    def _find(cls):
        for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
            if cls._runtime is None:
                try:
                    cls._runtime = ctypes.CDLL(name)
                except OSError:
                    pass
        if cls._runtime is None:
            raise RuntimeError("no libcudart was found: pass tensors of your framework as outputs")
        return cls._runtime


def _device_of(owner):
    if isinstance(owner, _DeviceMemory):
        return owner.device
    if isinstance(owner, _Imported):
        return owner.tensor.device_id
    raise BufferError("the tensor's device is not known: export the object that it was made from")


def empty(shape, dtype, device=CPU):
    """A new tensor, not initialised, aligned to 64 bytes. On "cuda" allocating may wait for the device: reuse outputs
    where that matters, by the argument `out`."""
    dtype_number(dtype)
    shape = tuple(shape)
    size = math.prod(shape) * _DTYPES[dtype][2] // 8
    if device == CUDA:
        memory = _DeviceMemory(max(size, 1))
        return Tensor(shape, dtype, CUDA, memory.pointer, memory)
    memory = (ctypes.c_char * (size + 64))()
    return Tensor(shape, dtype, CPU, (ctypes.addressof(memory) + 63) & ~63, memory)


def resolved(backend):
    """"cpu" or "cuda": what a backend's name means here."""
    numbers = {"auto": 0, "cpu": 1, "cuda": 2}
    if backend not in numbers:
        raise ValueError(f"backend is '{backend}': expected auto, cpu or cuda")
    result = ctypes.c_int32()
    check(library.epmoe_backend_resolve(numbers[backend], ctypes.byref(result)))
    return {1: CPU, 2: CUDA}[result.value]
