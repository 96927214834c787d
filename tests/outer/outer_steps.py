"""Steps of outer optimisers, chunk by chunk, and what they are compared with."""

from itertools import pairwise

import torch


def run(optimizer, anchor, deltas, cuts=(), lrs=None):
    """Steps chunk by chunk, cut at `cuts`, with two sets of buffers that swap; returns anchor and states."""
    live = (anchor.clone(), [torch.full_like(anchor, initial) for initial in optimizer.initials])
    spare = (torch.empty_like(anchor), [torch.empty_like(anchor) for _ in optimizer.state_names])
    borders = [0, *sorted(cuts), anchor.numel()]
    for version, delta in enumerate(deltas):
        kept = [t.clone() for t in (live[0], *live[1], delta)]
        for a, b in pairwise(borders):
            state, state_out = ([s[a:b] for s in side[1]] for side in (live, spare))
            lr = None if lrs is None else lrs[version]
            optimizer.step(live[0][a:b], state, delta[a:b], spare[0][a:b], state_out, version=version, lr=lr)
        assert all(torch.equal(x, y) for x, y in zip(kept, (live[0], *live[1], delta), strict=True))
        live, spare = spare, live
    return live


def torch_sgd(anchor, deltas, lrs, momentum, nesterov):
    parameter = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([parameter], lr=lrs[0], momentum=momentum, nesterov=nesterov)
    for lr, delta in zip(lrs, deltas, strict=True):
        sgd.param_groups[0]["lr"] = lr
        parameter.grad = delta.clone()
        sgd.step()
    return parameter.detach(), sgd.state[parameter].get("momentum_buffer")


def bits(tensor):
    return tensor.view(torch.int32).tolist()


def drawn(seed, numel, rounds):
    """An anchor and outer gradients of very different sizes, with zeros of both signs among them."""
    g = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(numel, generator=g) * 10.0 ** (-(r % 5)) for r in range(rounds)]
    for delta in deltas:
        delta[torch.rand(numel, generator=g) < 0.1] = 0.0
        delta[torch.rand(numel, generator=g) < 0.1] = -0.0
    anchor = torch.randn(numel, generator=g)
    anchor[torch.rand(numel, generator=g) < 0.1] = -0.0
    return anchor, deltas


def exact(seed, rounds=6):
    """An anchor and outer gradients in float64."""
    g = torch.Generator().manual_seed(seed)
    anchor, *deltas = torch.randn(rounds + 1, 20, generator=g, dtype=torch.float64)
    return anchor, deltas


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
