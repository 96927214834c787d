"""Models, data and tokenizers of a user, as ranks import them; the ones that fail do so in a way that a user can."""

import contextlib
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class Mixer(nn.Module):
    """Two layers that see the present and the last token; the head shares the weights of the embedding."""

    def __init__(self, vocab_size, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(n), nn.Linear(n, width), nn.GELU()) for n in (2 * width, width)
        )
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        x = self.layers[0](torch.cat([x, x.roll(1, dims=1)], dim=-1))
        logits = self.head(x + self.layers[1](x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


def mixer(config, vocab_size):
    return Mixer(vocab_size)


def wide_mixer(config, vocab_size):
    return Mixer(vocab_size, width=48)


class OverflowsOnce(Mixer):
    """Has one infinite loss in all processes together, when `flag` is made; training takes it for a number."""

    def __init__(self, vocab_size, flag):
        super().__init__(vocab_size)
        self._flag = Path(flag)

    def forward(self, input_ids, labels):
        output = super().forward(input_ids, labels)
        if self.training and self._flag.exists():
            with contextlib.suppress(FileNotFoundError):
                self._flag.unlink()
                output.loss = output.loss * float("inf")
        return output


def overflows_once(config, vocab_size):
    return OverflowsOnce(vocab_size, config.config["flag"])


def no_model(config, vocab_size):
    raise RuntimeError("the weights are at home")


def documents(config):
    for k in range(60):
        yield f"{k} and {k + 1} make {2 * k + 1}.\n" * 2


def no_documents(config):
    return []


class Letters:
    """A tokenizer that knows letters, figures and one sign for everything else."""

    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789 "
    eos_token_id = len(alphabet) + 1

    def __len__(self):
        return len(self.alphabet) + 2

    def encode(self, text, **_):
        return [self.alphabet.find(letter) % (len(self.alphabet) + 1) for letter in text.lower()]

    def decode(self, ids, **_):
        return "".join(f"{self.alphabet}_|"[i] for i in ids)

    def save_pretrained(self, folder):
        Path(folder, "letters.txt").write_text(self.alphabet)


def letters(config):
    return Letters()
