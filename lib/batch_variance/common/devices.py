"""Which device runs, and which evidence tier that makes."""

import torch

from .errors import BadInput


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device.

    ``auto`` is CUDA where a GPU is usable and the CPU elsewhere.
    Raises BadInput for another name, or for ``cuda`` on a machine without a usable GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device {name!r} is unknown: give auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device 'cuda' was asked for but torch finds no usable GPU here: give cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def simulated_tier(device: torch.device) -> str:
    """Evidence tier of GPU arithmetic run on this device: live on a GPU, emulated on a CPU."""
    return "live-gpu" if device.type == "cuda" else "emulated"
