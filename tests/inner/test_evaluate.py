import itertools
import types

import numpy as np
import pytest
import torch

from ray_diloco.inner.evaluate import block_losses

CPU = torch.device("cpu")
VOCAB = 5
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
BLOCKS = np.random.default_rng(0).integers(0, VOCAB, (5, 7)).astype(np.uint16)


def with_logits(ids):
    return types.SimpleNamespace(logits=TABLE[ids])


def loss_only(ids):
    logits = TABLE[ids]
    return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


def nats_by_hand(block):
    log_p = TABLE.double() - TABLE.double().exp().sum(1, keepdim=True).log()
    return -sum(float(log_p[a, b]) for a, b in itertools.pairwise(block))


@pytest.mark.parametrize("forward", [with_logits, loss_only])
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 8])
def test_each_block_gets_its_own_sum_of_nats(forward, micro_batch):
    losses = block_losses(forward, BLOCKS, micro_batch, CPU)
    assert [count for _, count in losses] == [6] * 5
    np.testing.assert_allclose([nats for nats, _ in losses], [nats_by_hand(b) for b in BLOCKS], rtol=1e-6)


def test_every_forward_pass_has_the_same_shape():
    shapes = []

    def forward(ids):
        shapes.append(tuple(ids.shape))
        return with_logits(ids)

    block_losses(forward, BLOCKS, 2, CPU)
    assert shapes == [(2, 7)] * 3


def test_no_blocks_take_no_forward_pass():
    assert block_losses(with_logits, BLOCKS[:0], 2, CPU) == []
