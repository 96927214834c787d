"""Random state as a function of where the run stands: dropout needs no saved generator to resume exactly."""

from __future__ import annotations

import hashlib

import torch


def seed_step(seed: int, island: str, rank: int, step: int, device: torch.device) -> None:
    """Seeds the device's generator for one optimiser step; ranks and islands draw different numbers."""
    digest = hashlib.blake2b(f"{seed}/{island}/{rank}/{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    # Not torch.manual_seed: without a GPU it keeps a formatted stack for each call, 1 to 3 % of a small step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
