"""CUDA C++ compiled at run time, for the kernels that Triton cannot express.

It needs the driver and NVRTC (in torch's CUDA wheels). Compiled code is kept in TRITON_CACHE_DIR, by source, options
and compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from triton.runtime.cache import get_cache_manager

HOPPER = 9  # major number of the compute capability: sm_90a alone has products of a warpgroup
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CudaUnavailable(Exception):
    """The compiler is missing, or refuses the source for this device."""


class CudaFailed(RuntimeError):
    """The driver refused a module or a launch."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    def __init__(self, source: str, name: str, device: torch.device, *, shared_bytes: int) -> None:
        """shared_bytes: the most dynamic shared memory of a launch. Raises CudaUnavailable, CudaFailed."""
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile_cubin(source, name, f"sm_{major}{minor}{'a' if major == HOPPER else ''}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the device's context is there and current
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
            self._check(
                self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            )
            self._check(self._driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes))

    def launch(
        self,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: Sequence[torch.Tensor | int | float | None],
        *,
        pdl: bool,
    ) -> None:
        """On torch's current stream; may be captured. Tensors (None: a null pointer) go to pointers, ints to `int`,
        floats to `float`. Raises CudaFailed.
        """
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = int(pdl)
        config = _LaunchConfig(
            grid, (num_threads, 1, 1), shared_bytes, torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute), 1,
        )  # fmt: skip
        self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise CudaFailed(f"{(text.value or b'unknown error').decode()} ({status})")


def _value(argument: torch.Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def with_instructions(path: Path, defined: Mapping[str, int | str], *headers: str) -> str:
    lines = [f"#define {name} {value}" for name, value in defined.items()]
    files = [path.with_name(name) for name in ("instructions.cuh", *headers)]
    return "\n".join([*lines, *(file.read_text() for file in [*files, path])])


def compile_cubin(source: str, name: str, arch: str) -> bytes:
    """source: without includes; arch: "sm_90". Raises CudaUnavailable."""
    nvrtc = _find_nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    identity = "\0".join([source, *options, f"{version[0].value}.{version[1].value}"])
    cache = get_cache_manager(hashlib.sha256(identity.encode()).hexdigest())
    found = cache.get_file("module.cubin")
    if found is not None:
        return Path(found).read_bytes()
    cubin = _compile(nvrtc, source, name, options)
    cache.put(cubin, "module.cubin", binary=True)
    return cubin


def _compile(nvrtc: ctypes.CDLL, source: str, name: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if status:
        raise CudaUnavailable(f"NVRTC: no program ({status})")
    try:
        encoded = [option.encode() for option in options]
        if nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise CudaUnavailable(f"NVRTC: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


def _find_nvrtc() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise CudaUnavailable("torch is built without CUDA")
    major = torch.version.cuda.partition(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(folder) for folder in (*site.getsitepackages(), *sys.path) if folder]
    for path in (path for folder in folders for path in sorted(folder.glob(f"nvidia/*/lib/{name}"))):
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))  # NVRTC asks for it by name, which does not find it beside itself
        return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaUnavailable(f"{name} is not installed: {error}") from error
