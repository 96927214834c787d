"""A rank that says things in every codec, for tests of error feedback."""

import numpy as np
import torch
from outer_world import anchor_payload

# Imported before chunks are made small, as they keep their size.
import ray_diloco.outer.quantise
import ray_diloco.outer.sparse  # noqa: F401
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.payload import Meta, open_payload

LAYOUT = layout_of([("w", (4, 6)), ("b", (5,)), ("v", (3, 7)), ("s", ())])
WHOLE = LAYOUT.whole
META = Meta("contribution", {0: 0}, "i0")

# Codecs whose units are as short as the chunks of these tests, and those that take whole tensors.
SMALL = [
    ("fp32", {}),
    ("bf16", {}),
    ("fp16", {}),
    ("int8", {"block": 8}),
    ("int8", {"block": 8, "rounding": "stochastic"}),
    ("int4", {"block": 4}),
    ("topk", {"k": 1, "block": 4}),
    ("topk", {"k": 3, "block": 8, "values": "bf16"}),
    ("mask", {"p": 0.4, "block": 8}),
]
TENSORS = [
    ("dct", {"block": 4, "k": 3}),
    ("dct", {"block": 8, "k": 100, "values": "bf16"}),
    ("low_rank", {"rank": 1}),
    ("low_rank", {"rank": 2, "values": "bf16"}),
]
# Those whose units are as long as a chunk of the real size.
LARGE = [("int8_bin_mean", {}), ("e3m0", {}), ("2bit", {}), ("2bit", {"codebook": "bin_mean"}), ("1bit", {}),
         ("1bit", {"codebook": "quantile"}), ("mask", {"p": 0.01})]  # fmt: skip


def drawn(seed, numel=LAYOUT.numel, scale=1.0):
    return torch.from_numpy(scale * np.random.default_rng(seed).standard_normal(numel)).float()


class Rank:
    """A rank that holds everything and emits some of it."""

    def __init__(self, feedback, emits=WHOLE, layout=LAYOUT, start=None):
        self.theta = torch.zeros(layout.numel)
        self.exchange = Exchange(layout, [Slice(layout.whole[0], self.theta)], emits, feedback=feedback)
        self.start = np.zeros(layout.numel) if start is None else start
        self.layout = layout
        self.reset()

    def reset(self):
        self.exchange.adopt([anchor_payload(self.start, self.layout.whole)])

    def say(self, x, codec, ranges=None, meta=META):
        """Emits `x`, and adopts the anchor again."""
        self.theta.sub_(x)
        emission = self.exchange.emit(ranges or self.exchange.emits, codec, meta)
        sent = emission.payload.copy()
        self.reset()
        return decoded(sent), emission

    @property
    def error(self):
        state = self.exchange.state(with_parameters=False)
        found = sorted((int(k.split("|")[1]), v) for k, v in state.items() if k.startswith("error"))
        return np.concatenate([v for _, v in found])


def decoded(array):
    """What a message says, element by element."""
    payload = open_payload(array)
    values = torch.empty(payload.numel)
    if payload.dense:
        from ray_diloco.outer import chunks

        for start in range(0, payload.numel, chunks.CHUNK):
            stop = min(start + chunks.CHUNK, payload.numel)
            values[start:stop] = payload.read(start, stop, torch.empty(stop - start))
    else:
        for at, shape, data, nonce in payload.read_tensors():
            payload.shaped_codec.decode(data, shape, values[at : at + int(np.prod(shape))], nonce)
    return values.numpy().astype(np.float64)
