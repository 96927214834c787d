"""A rank that has trained and is told to begin anew, as when its driver died before a round was durable."""

from dataclasses import replace

import little_ranks
import pytest
import torch

from ray_diloco.blocks import channels_of, cuts_of
from ray_diloco.cluster.exchanges import Exchanges
from ray_diloco.config.compose import compose
from ray_diloco.inner.rank import InnerRank
from ray_diloco.outer.layout import intersect
from ray_diloco.outer.payload import Meta

STEPS = 5


class Rank:
    """A rank of the little model under a configuration, and the founding anchors that it stands at."""

    def __init__(self, *settings):
        config = compose(settings).config
        channels = channels_of(config)
        little = little_ranks.settings(0, "fp32", 0, 1)
        blocks = {name: getattr(config.inner, name) for name in ("mix", "correction", "proximal", "optimizer")}
        self.inner = InnerRank(replace(little, inner=replace(little.inner, **blocks)))
        self.exchanges = Exchanges(self.inner, channels)
        cuts = cuts_of(channels, self.inner.layout)
        self.exchanges.connect(cuts)
        self.fragments = {
            number: (exchange, intersect(ranges, self.inner.emits))
            for cut, exchange in zip(cuts, self.exchanges._exchanges, strict=True)
            for number, ranges in zip(cut.numbers, cut.fragments, strict=True)
        }
        self.founding = {
            number: exchange.read(ranges, Meta("anchor", {number: 0}, "", 0)).copy()
            for number, (exchange, ranges) in self.fragments.items()
        }

    def join(self):
        self.exchanges.join(list(self.founding), list(self.founding.values()))

    def round(self, start):
        """Trains from a step on; all that is sent then, and the parameters."""

        def batches(k):
            return little_ranks.tokens(start + k).reshape(2, 2, little_ranks.SEQUENCE)

        self.inner.train(start, STEPS, batches)
        sent = []
        for number, (_, ranges) in self.fragments.items():
            self.exchanges.begin(number)
            meta = Meta("contribution", {number: 0}, "", 0)
            sent.append(self.exchanges.emit(number, ranges, meta).payload.tobytes())
        return sent, torch.cat([s.values.clone() for s in self.inner.slices])


@pytest.mark.parametrize(
    "settings",
    [
        ("codec.up.kind=int4", "codec.up.feedback=true"),
        *[(f"algorithm={name}",) for name in ("scaffold", "gpa", "dilocox", "demo", "sparta_diloco", "muloco")],
        ("algorithm=streaming", "fragments.kind=bins", "codec.up.feedback=true"),
    ],
)
def test_it_does_what_a_new_one_does(settings):
    rank = Rank(*settings)
    rank.join()
    sent, theta = rank.round(0)
    rank.round(STEPS)
    rank.join()
    remembering, _ = rank.round(0)
    # All that SCAFFOLD remembers, with an inner optimiser of no memory, is what a rank joins.
    assert (remembering == sent) == (settings == ("algorithm=scaffold",))
    rank.inner.reset_inner_state()
    rank.exchanges.forget()
    rank.join()
    anew, same = rank.round(0)
    assert anew == sent and torch.equal(same, theta)
