"""Values of the host on their way to a device."""

import torch


def sent(values, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Host values, a tensor or what makes one, on the device, without waiting for it."""
    values = torch.as_tensor(values, dtype=dtype)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
