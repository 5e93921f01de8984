"""Stored numbers to float32, a run of blocks at a time.

Each decoder takes the blocks as they are in the file, ``uint8[num_blocks, block_bytes]``, and fills
``float32[num_blocks, block_elements]``. The arithmetic is that of ``gguf.dequantize``, operation by
operation, so the results are equal to the last bit (tests compare them); it is torch's because that
is some thirty times faster than what is done there. A format that only ``gguf`` knows goes through
``gguf``.

Masks and shifts run over whole blocks, scales included: one long loop is faster than many of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fastserve.models.tensors import Format, find_format

Decode = Callable[[Tensor, Tensor], None]


def is_known(layout: Format) -> bool:
    """Whether a decoder here or in ``gguf`` knows the format."""
    return layout.name in _DECODERS or find_format(layout.name) is not None


def decode(layout: Format, raw: Tensor, out: Tensor) -> None:
    """Fill ``out`` with the numbers in ``raw``."""
    known = _DECODERS.get(layout.name)
    if known is not None:
        known(raw, out)
    else:
        _decode_rare(layout, raw, out)


def _halves(raw: Tensor, start: int, count: int) -> list[Tensor]:
    """``count`` float16 from byte ``start`` of every block on, each ``float32[num_blocks, 1]``."""
    halves = raw[:, start : start + 2 * count].contiguous().view(torch.float16).float()
    return [halves[:, index : index + 1] for index in range(count)]


def _plain(dtype: torch.dtype) -> Decode:
    def run(raw: Tensor, out: Tensor) -> None:
        out.copy_(raw.view(dtype))

    return run


def _q8_0(raw: Tensor, out: Tensor) -> None:
    (scale,) = _halves(raw, 0, 1)
    out.copy_(raw[:, 2:].view(torch.int8)).mul_(scale)


def _q4_0(raw: Tensor, out: Tensor) -> None:
    (scale,) = _halves(raw, 0, 1)
    out[:, :16].copy_((raw & 15)[:, 2:])
    out[:, 16:].copy_((raw >> 4)[:, 2:])
    out.sub_(8.0).mul_(scale)


def _q4_1(raw: Tensor, out: Tensor) -> None:
    scale, minimum = _halves(raw, 0, 2)
    out[:, :16].copy_((raw & 15)[:, 4:])
    out[:, 16:].copy_((raw >> 4)[:, 4:])
    out.mul_(scale).add_(minimum)


def _q4_k(raw: Tensor, out: Tensor) -> None:
    """Eight groups of 32; a 6-bit scale and a 6-bit minimum each, packed into 12 bytes."""
    scale, minimum = _halves(raw, 0, 2)
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), dim=1).float().mul_(scale)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), dim=1).float().mul_(minimum)
    # Each 32 bytes hold two groups: all low halves, then all high halves.
    groups = out.unflatten(1, (4, 2, 32))
    groups[:, :, 0].copy_((raw & 15)[:, 16:].unflatten(1, (4, 32)))
    groups[:, :, 1].copy_((raw >> 4)[:, 16:].unflatten(1, (4, 32)))
    out.unflatten(1, (8, 32)).mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2))


def _q6_k(raw: Tensor, out: Tensor) -> None:
    """Sixteen groups of 16 with int8 scales; four low bits in ``ql``, two high ones in ``qh``."""
    (scale,) = _halves(raw, 208, 1)
    scales = raw[:, 192:208].view(torch.int8).float().mul_(scale)
    low = raw[:, :128].contiguous()
    high = raw[:, 128:192].contiguous()
    groups = out.unflatten(1, (2, 4, 32))
    for index in range(4):
        # The halves of the block alternate: 32 numbers of one half, 32 of the next.
        four = (low >> 4 * (index // 2) & 15).unflatten(1, (2, 2, 32))[:, :, index % 2]
        two = (high >> 2 * index & 3).unflatten(1, (2, 32))
        groups[:, :, index].copy_(four | two << 4)
    out.sub_(32.0).unflatten(1, (16, 16)).mul_(scales.unsqueeze(2))


_DECODERS: Final[dict[str, Decode]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def _decode_rare(layout: Format, raw: Tensor, out: Tensor) -> None:
    import gguf

    numbers = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[layout.name])
    out.copy_(torch.from_numpy(numbers).view_as(out))
