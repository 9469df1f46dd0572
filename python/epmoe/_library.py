"""Finds and loads libepmoe, and turns its statuses into exceptions."""

import ctypes
import ctypes.util
import os
import pathlib

from . import _abi


class Error(RuntimeError):
    """A call of the library failed: `status` is its number (epmoe.STATUS), the text says which argument and why."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def _candidates(name, variable):
    if os.environ.get(variable):
        return [os.environ[variable]]
    # PREFIX/share/epmoe/python/epmoe/_library.py: the library of the same prefix.
    parents = pathlib.Path(__file__).resolve().parents
    paths = [path for folder in ("lib", "lib64", "lib/*") if len(parents) > 4
             for path in sorted(parents[4].glob(f"{folder}/lib{name}.so.0.1"))]
    return [str(path) for path in paths] + [f"lib{name}.so.0.1", ctypes.util.find_library(name)]


def _load(name, variable):
    tried = []
    for path in _candidates(name, variable):
        if not path:
            continue
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    raise ImportError(f"lib{name}.so was not found; set {variable} to its path, or LD_LIBRARY_PATH to its folder "
                      f"({'; '.join(tried)})")


library = _load("epmoe", "EPMOE_LIBRARY")
for _name, (_result, _parameters) in _abi.FUNCTIONS.items():
    _function = getattr(library, _name)
    _function.restype, _function.argtypes = _result, _parameters


def version():
    """(major, minor, patch) of the library that was loaded."""
    number = library.epmoe_version()
    return number // 10000, number // 100 % 100, number % 100


# Before 1.0 a minor version may change the ABI.
VERSION = (0, 1)
if version()[:2] != VERSION:
    raise ImportError(f"this package is for epmoe {VERSION[0]}.{VERSION[1]}, the library that was found is "
                      f"{'.'.join(map(str, version()))}")


def check(status):
    if status != _abi.EPMOE_OK:
        text = library.epmoe_last_error().decode(errors="replace")
        raise Error(status, text or library.epmoe_status_string(status).decode())


def mpi_library():
    """libepmoe_mpi; lies beside libepmoe."""
    mpi = _load("epmoe_mpi", "EPMOE_MPI_LIBRARY")
    mpi.epmoe_comm_create_mpi.restype = ctypes.c_int32
    return mpi
