"""What the worker must know of its device."""

from __future__ import annotations

import torch

from quire.kernels.triton.attention_tiles import DeviceLimits

INTERPRETED_MULTIPROCESSORS = 8


def device_limits(device: torch.device) -> DeviceLimits:
    """What decides the shapes of kernels. The interpreter runs one program at a time: work is cut into few of them."""
    if device.type != "cuda":
        return DeviceLimits(num_multiprocessors=INTERPRETED_MULTIPROCESSORS)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type != "cuda":
        return "the host, interpreted"
    name: str = torch.cuda.get_device_name(device)
    return name
