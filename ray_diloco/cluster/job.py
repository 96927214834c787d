"""What a rank is started with, and the data that it finds or prepares on its machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_diloco.blocks import Channel
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortunes
from ray_diloco.cluster.traffic import own_address
from ray_diloco.config.schema import DataConfig, TokenizerConfig

if TYPE_CHECKING:
    from ray_diloco.data.blocks import Blocks, Corpus
    from ray_diloco.inner.settings import RankSettings


@dataclass(frozen=True)
class RankJob:
    """What a rank actor is started with.

    Attributes:
      settings: of rank 0; rank, host and port are filled in.
      corpus, heldout: prepared blocks to train on and to evaluate on; `data`, `heldout_data` and `tokenizer` say how to
        prepare them where they are missing (another machine).
      channels: what is exchanged and how; the main one first.
      incarnation: how often the island was started anew.
      orphan_s: seconds without a word from any driver after which it ends itself; 0: never.
      folders: where a user's own modules are imported from.
      faults: what goes wrong in the island on purpose.
    """

    settings: RankSettings
    corpus: Corpus
    heldout: Corpus
    data: DataConfig
    heldout_data: DataConfig
    tokenizer: TokenizerConfig
    channels: tuple[Channel, ...]
    incarnation: int = 0
    orphan_s: float = 0.0
    folders: tuple[str, ...] = ()
    faults: Misfortunes = NO_FAULTS


def open_blocks(corpus: Corpus, data: DataConfig, job: RankJob) -> Blocks:
    """Opens prepared blocks, preparing them first on a machine that does not have them."""
    from ray_diloco.data.blocks import prepare
    from ray_diloco.errors import DataError

    if not os.path.isdir(corpus.folder):
        here = prepare(data, job.tokenizer, trained_on=job.heldout_data)
        if here.digest != corpus.digest:
            raise DataError(
                390,
                f"the data of {corpus.name} on node {own_address()} differs from the driver's: "
                f"{here.digest[:16]}… against {corpus.digest[:16]}…",
                "give every node the same files, or put data.cache on storage that all nodes share",
            )
        corpus = here
    return corpus.open()
