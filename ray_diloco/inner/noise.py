"""Random state as a function of where the run stands: dropout needs no saved generator to resume exactly."""

from __future__ import annotations

import hashlib

import torch


def seed_step(seed: int, island: str, rank: int, step: int) -> None:
    """Seeds torch for one optimiser step; ranks and islands draw different numbers."""
    digest = hashlib.blake2b(f"{seed}/{island}/{rank}/{step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
