"""One round between two islands that train on the same data, in this process: it has to be plain training.

With an outer optimiser that takes the step as it comes, the anchor after a round is what both islands have trained to.
Where it is not, something of this machine computes wrongly, and every round of a run would go astray in silence.
Source: DiLoCo, 2311.08105, with η = 1 and μ = 0.
"""

from __future__ import annotations

import torch

from ray_diloco.doctor.record import Check, passed
from ray_diloco.errors import DilocoError
from ray_diloco.outer.codec import codec_of
from ray_diloco.outer.contribution import Contribution
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, layout_of
from ray_diloco.outer.momentum import Sgd
from ray_diloco.outer.payload import Meta
from ray_diloco.outer.shard import AnchorShard

# Of the largest element: two roundings in fp32, and room.
TOLERANCE = 1e-6
_NAME, _STEPS, _WIDTH, _ISLANDS = "a round", 5, 32, ("a", "b")


def check_round(where: str = "") -> Check:
    """Compares a round of two equal islands with plain training, in fp32."""
    try:
        difference = _difference()
    except DilocoError as error:
        return Check(_NAME, where, "fail", error.what, error.mend)
    said = f"two islands with the same data are {difference:.0e} of the largest element from plain training"
    if difference <= TOLERANCE:
        return passed(_NAME, where, said)
    mend = "memtest, another build of torch: this machine does not compute what others do"
    return Check(_NAME, where, "fail", f"{said}, more than {TOLERANCE:.0e}", mend)


def _difference() -> float:
    layout = layout_of([("weight", (_WIDTH, _WIDTH)), ("bias", (_WIDTH,))])
    whole, numel = layout.whole, layout.numel
    thetas = [torch.zeros(numel) for _ in _ISLANDS]
    islands = [Exchange(layout, [Slice(Range(0, numel), theta)], whole) for theta in thetas]
    shard = AnchorShard(layout, whole, [whole], Sgd(1.0), codec_of("fp32"))
    begin = _model()
    thetas[0].copy_(_flat(begin))
    shard.found([islands[0].read(whole, Meta("parameters", island=_ISLANDS[0]))])
    for island, theta in zip(islands, thetas, strict=True):
        island.adopt([shard.payload(0)])
        model = _model()
        _set(model, theta)
        _train(model)
        theta.copy_(_flat(model))
    offers = [
        Contribution(name, 1.0, 0, (island.emit(whole, codec_of("fp32"), Meta("contribution", {0: 0}, name)).payload,))
        for name, island in zip(_ISLANDS, islands, strict=True)
    ]
    prepared, payload = shard.prepare("round 1", 0, offers)
    shard.commit(prepared.key)
    _train(begin)
    plain = _flat(begin)
    for island in islands:
        island.adopt([payload])
    # torch's maximum keeps what is not a number.
    return float((torch.stack(thetas) - plain).abs().max() / plain.abs().max())


def _model() -> torch.nn.Linear:
    """The same in every process, whatever was drawn before."""
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    _set(model, torch.randn(_WIDTH * _WIDTH + _WIDTH, generator=torch.Generator().manual_seed(1)))
    return model


def _train(model: torch.nn.Linear) -> None:
    generator, parameters = torch.Generator().manual_seed(2), list(model.parameters())
    for _ in range(_STEPS):
        x, y = torch.randn(2, 8, _WIDTH, generator=generator)
        gradients = torch.autograd.grad((model(x) - y).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data.sub_(gradient, alpha=0.1)


def _flat(model: torch.nn.Linear) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _set(model: torch.nn.Linear, values: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())
