from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

LEAST_CAPABILITY = (8, 0)
"""Oldest compute capability with bfloat16 in its tensor cores."""

DRIVER = "libcuda.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""CUdevice_attribute numbers: multiprocessors, and both parts of the compute capability."""
_NAME_BYTES = 256


@dataclass(frozen=True)
class CudaDevice:
    """CUDA device that the driver shows. memory: bytes. capability: compute capability (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]
    num_multiprocessors: int


@dataclass(frozen=True)
class CudaFacts:
    """CUDA facts of this machine, found without torch. torch_cuda: CUDA version of the installed torch; None: no CUDA,
    or no torch. driver: newest CUDA version that the driver knows; None: no driver answers. devices: visible ones
    (CUDA_VISIBLE_DEVICES). trouble: reason why none can be used."""

    torch_cuda: str | None
    driver: tuple[int, int] | None
    devices: tuple[CudaDevice, ...]
    trouble: str | None

    @property
    def is_present(self) -> bool:
        return self.trouble is None


def find_cuda() -> CudaFacts:
    """Read torch's files, and query the driver if torch could use one. For `quire doctor` and the choice of a
    device."""
    torch_version, torch_cuda = _torch_build()
    if torch_cuda is None:
        missing = "torch is not installed" if torch_version is None else f"torch {torch_version} was built without CUDA"
        return CudaFacts(None, None, (), missing)
    driver, devices, trouble = _ask_driver()
    if trouble is None and driver is not None and driver[0] < int(torch_cuda.partition(".")[0]):
        trouble = f"torch was built for CUDA {torch_cuda}, and the driver knows CUDA {driver[0]}.{driver[1]} only"
    return CudaFacts(torch_cuda, driver, devices, trouble)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _torch_build() -> tuple[str | None, str | None]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None, None
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return None, None
    return _assigned(text, "__version__"), _assigned(text, "cuda")


def _assigned(text: str, name: str) -> str | None:
    found = re.search(rf"^{re.escape(name)}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


def _ask_driver() -> tuple[tuple[int, int] | None, tuple[CudaDevice, ...], str | None]:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None, (), f"there is no CUDA driver ({DRIVER})"
    version, count = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0)
    if status == 0:
        status = driver.cuDriverGetVersion(ctypes.byref(version)) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return None, (), f"the CUDA driver answers with error {status}"
    known = version.value // 1000, version.value % 1000 // 10
    if count.value == 0:
        return known, (), "the CUDA driver shows no device (is CUDA_VISIBLE_DEVICES set?)"
    return known, tuple(_device(driver, index) for index in range(count.value)), None


def _device(driver: ctypes.CDLL, index: int) -> CudaDevice:
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, _NAME_BYTES, handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    capability = attribute(_MAJOR), attribute(_MINOR)
    return CudaDevice(name.value.decode(errors="replace"), memory.value, capability, attribute(_MULTIPROCESSORS))
