"""Models of users: one that meets the contract of `model.builder`, and ones that break it in each way."""

import types

import torch
from torch import nn

not_a_function = 3


class Bigram(nn.Module):
    """The least model: a table of logits of the next token, by the present one."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids, labels):
        logits = self.table(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


class LossOnly(Bigram):
    def forward(self, input_ids, labels):
        return {"loss": super().forward(input_ids, labels).loss}


class NoLabels(Bigram):
    def forward(self, input_ids):
        return self.table(input_ids)


class NoLoss(Bigram):
    def forward(self, input_ids, labels):
        return self.table(input_ids)


class LossPerToken(Bigram):
    def forward(self, input_ids, labels):
        return {"loss": self.table(input_ids).mean(-1)}


class Fails(Bigram):
    def forward(self, input_ids, labels):
        raise ValueError("no such token")


def bigram(config, vocab_size):
    return Bigram(vocab_size)


def loss_only(config, vocab_size):
    return LossOnly(vocab_size)


def half_precision(config, vocab_size):
    return Bigram(vocab_size).bfloat16()


def no_labels(config, vocab_size):
    return NoLabels(vocab_size)


def no_loss(config, vocab_size):
    return NoLoss(vocab_size)


def loss_per_token(config, vocab_size):
    return LossPerToken(vocab_size)


def failing_forward(config, vocab_size):
    return Fails(vocab_size)


def not_a_module(config, vocab_size):
    return torch.zeros(3)


def raising(config, vocab_size):
    raise RuntimeError("no weights here")


def frozen(config, vocab_size):
    return Bigram(vocab_size).requires_grad_(False)
