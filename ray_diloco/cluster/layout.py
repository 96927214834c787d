"""The canonical form of a model before any island has built it, where the schedule depends on it.

A task of its own builds the model without memory for its parameters, so that neither torch nor the model come into the
driver.
"""

from __future__ import annotations

import ray

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.cluster.imports import add_folders
from ray_diloco.config.schema import ModelConfig
from ray_diloco.data.blocks import Corpus
from ray_diloco.errors import CommittedError
from ray_diloco.outer.layout import Layout


@ray.remote(num_cpus=0, max_retries=0)
def model_layout(model: ModelConfig, corpus: Corpus, sequence_length: int, folders: tuple[str, ...]) -> Layout:
    """Layout of the model of a run.

    Args:
      model: which.
      corpus: gives the vocabulary.
      sequence_length: tokens per sequence.
      folders: where a user's own modules are imported from.
    """
    add_folders(folders)
    from ray_diloco.inner.model import build_model
    from ray_diloco.inner.slices import layout_of_model

    return layout_of_model(build_model(model, corpus.vocab_size, corpus.eos_id, sequence_length, 0))


def check_layout(manifest: Manifest, layout: Layout) -> None:
    """Sees that a commit is of a model with this layout.

    Raises:
      CommittedError: RD-560, it is of another.
    """
    before, now = dict(manifest.layout), {t.name: t.shape for t in layout.tensors}
    if list(before.items()) != list(now.items()):
        differing = [name for name in (*before, *now) if before.get(name) != now.get(name)]
        first = differing[0] if differing else next(iter(now))
        raise CommittedError(
            560,
            f"round {manifest.round} was committed with another model: tensor {first!r} has shape {before.get(first)} "
            f"there and {now.get(first)} here",
            "use the model of the run, or another run.name",
        )
