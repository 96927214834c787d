"""DiLoCo in plain torch: what a run must equal.  It shares model, blocks and their order with the package, no more.

Each island takes the next blocks in turn: in round `r` island `k` of `K` trains on the virtual indices from
`(r K + k) H batch` on, or from `r H batch` on in a ledger of its own.
"""

import copy

import numpy as np
import torch

from ray_diloco.data.permutation import virtual_to_block


def diloco(model, blocks, count, *, islands, rounds, H, batch, inner, outer, lr, clip, seed=0, own=False, reset=False):
    """Anchors by round from 0 on, tensors by name.

    `inner(parameters)` and `outer(parameters)` make torch optimisers; `lr(step)` is the inner rate of a global step;
    `reset` makes inner optimisers anew in every round.
    """
    names = [name for name, _ in model.named_parameters()]
    anchor = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = outer(anchor)
    replicas = [copy.deepcopy(model) for _ in range(islands)]
    inners = [inner(list(replica.parameters())) for replica in replicas]
    anchors = [by_name(names, anchor)]
    for r in range(rounds):
        deltas = []
        for k, replica in enumerate(replicas):
            parameters = list(replica.parameters())
            optimizer = inners[k] = inner(parameters) if reset else inners[k]
            for p, a in zip(parameters, anchor, strict=True):
                p.data.copy_(a.data)
            for s in range(H):
                first = ((r if own else r * islands + k) * H + s) * batch
                numbers = virtual_to_block(seed, np.arange(first, first + batch), count)
                ids = torch.from_numpy(blocks.train(numbers))
                optimizer.zero_grad()
                replica(input_ids=ids, labels=ids).loss.backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(parameters, clip)
                for group in optimizer.param_groups:
                    group["lr"] = lr(r * H + s)
                optimizer.step()
            deltas.append([a.data - p.data for a, p in zip(anchor, parameters, strict=True)])
        for i, a in enumerate(anchor):
            a.grad = sum(delta[i] / islands for delta in deltas)
        outer.step()
        anchors.append(by_name(names, anchor))
    return anchors


def by_name(names, tensors):
    return {name: t.detach().numpy().copy() for name, t in zip(names, tensors, strict=True)}


def decayed(weight_decay):
    """AdamW with weight decay on matrices only."""

    def make(parameters):
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)

    return make
