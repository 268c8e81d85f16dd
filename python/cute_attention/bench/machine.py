"""The machine that is measured: its name, versions, and the peak of its tensor cores."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .contenders import flash_attn_3

# Operations of the tensor cores per SM and clock: dense bf16 with fp32 accumulation, a multiply-add
# counted as two. The numbers are from NVIDIA's architecture whitepapers and agree with the
# published peaks: an A100 has 108 SMs * 2048 * 1.41 GHz = 312 TFLOP/s.
_FLOPS_PER_SM_AND_CLOCK = {
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 7): 2048,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}


def flops_per_sm_and_clock(capability: tuple[int, int], name: str) -> int | None:
    """Operations per SM and clock; None for a compute capability that is not in the table."""
    rate = _FLOPS_PER_SM_AND_CLOCK.get(capability)
    if rate and "GeForce" in name:  # GeForce halves the rate of fp32 accumulation
        return rate // 2
    return rate


@dataclass(frozen=True)
class Environment:
    """Where and with what a file of results was measured."""

    device: str
    driver: str
    compute_capability: str
    sms: int
    max_clock_mhz: int
    peak_tflops: float | None  # dense bf16; None where it is not known
    torch: str
    cuda: str
    cudnn: str
    python: str
    package: str
    commit: str
    peers: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def peak_text(self) -> str:
        """How the peak was computed, for the foot of a table."""
        if self.peak_tflops is None:
            return f"peak of {self.device}: not known, so no share of it is shown"
        rate = self.peak_tflops * 1e6 / (self.sms * self.max_clock_mhz)
        return (
            f"peak: {self.sms} SMs x {rate:.0f} bf16 operations per clock "
            f"x {self.max_clock_mhz} MHz = {self.peak_tflops:.0f} TFLOP/s dense"
        )


def _output(*command: str, cwd: Path | None = None) -> str:
    """Standard output of a command, "" if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()
    return ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Commit of the checkout this package is imported from, with "+changes" if it has any."""
    folder = Path(__file__).resolve().parent
    commit = _output("git", "rev-parse", "HEAD", cwd=folder)
    if not commit or not _output("git", "ls-files", "__main__.py", cwd=folder):
        return ""
    changes = _output("git", "status", "--porcelain", "--untracked-files=no", cwd=folder)
    return commit + ("+changes" if changes else "")


def _peers() -> dict[str, str]:
    """Versions of the peers that are installed; of a library without a package, its name and size,
    which is all that it tells."""
    names = ("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "triton")
    found = {name: version for name in names if (version := _version(name))}
    with contextlib.suppress(OSError, ValueError):  # the contender says what is wrong with it
        if path := flash_attn_3.library():
            found["flash-attn-3"] = f"{path.name}, {path.stat().st_size} bytes"
    return found


def driver_and_clock(uuid: str) -> tuple[str, int]:
    """The driver's version and the highest clock of a GPU's SMs in MHz; ("", 0) where NVIDIA's
    management library does not tell."""
    import pynvml  # here, so that `--help` works without the extra

    try:
        pynvml.nvmlInit()
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            clock = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            return pynvml.nvmlSystemGetDriverVersion(), clock
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "", 0


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> Environment:
    """The environment of a device, read once per run."""
    name, driver, capability, sms, clock = _cpu_name(), "", "", os.cpu_count() or 1, 0
    peak, cudnn = None, ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, sms = properties.name, properties.multi_processor_count
        major, minor = properties.major, properties.minor
        capability = f"{major}.{minor}"
        driver, clock = driver_and_clock(f"GPU-{properties.uuid}")
        clock = clock or getattr(properties, "clock_rate", 0) // 1000
        rate = flops_per_sm_and_clock((major, minor), name)
        peak = sms * rate * clock / 1e6 if rate and clock else None
        cudnn = str(torch.backends.cudnn.version() or "")
    return Environment(
        device=name,
        driver=driver,
        compute_capability=capability,
        sms=sms,
        max_clock_mhz=clock,
        peak_tflops=peak,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        cudnn=cudnn,
        python=platform.python_version(),
        package=_version("cute-attention"),
        commit=_commit(),
        peers=_peers(),
    )


def pick_device(name: str | None) -> torch.device:
    """The device of the command line; without one the current GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device is {name!r}, expected cuda, cuda:N or cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device is cuda, but PyTorch sees no GPU")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
