"""Text from an exported run: transformers' own sampling, with what small models and byte vocabularies need.

A model that was trained on short blocks knows positions only up to its context, so a longer text continues from the
last half of that context.  Text is shown as soon as its bytes form whole characters.  An empty prompt starts where
the documents of the corpus start: behind an end-of-text token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ray_diloco.errors import CheckpointError, ConfigError
from ray_diloco.export import TRAINED_LENGTH, no_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a tokenizer puts where bytes are no character, or none yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Show = Callable[[str], object]


def export_of(folder: Path) -> Path:
    """The export of the run in `folder`.

    Raises:
      CheckpointError: RD-542, it has none.
    """
    export = folder / "export"
    if not export.is_dir():
        others = sorted(path.parent.name for path in folder.parent.glob("*/export"))
        raise CheckpointError(
            542,
            f"the run {folder.name!r} has no export: {export} does not exist",
            "a run writes it when it ends, with export.enabled=true; give the same `ray-diloco train` command again; "
            f"runs with an export: {', '.join(others) or 'none'}",
        )
    return export


def generate(
    export: Path | str,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    show: Show | None = None,
) -> str:
    """Continues a prompt.

    Args:
      export: Hugging Face folder with model and tokenizer.
      prompt: text to continue; empty: the start of a document.
      tokens: tokens to add at most; an end-of-text token ends earlier.
      temperature: of the softmax; 0: the likeliest token each time.
      top_k: choose among so many likeliest tokens; 0: among all.
      seed: of the choice; the same call gives the same text on the same machine.
      show: called with each new piece of text as it comes, the prompt first; the pieces joined are the result.

    Returns:
      The prompt with its continuation.

    Raises:
      ConfigError: RD-172, an argument is out of its range; RD-173, an empty prompt and no end-of-text token.
      CheckpointError: RD-543, the folder cannot be loaded as a causal language model with a tokenizer; RD-544, its
        weights are not finite.
    """
    _check(tokens, temperature, top_k)
    model, tokenizer = _load(Path(export))
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else [_end_of_text(tokenizer)]
    transcript = Transcript(tokenizer, show)
    transcript.add(start)
    settings: dict[str, Any] = {"do_sample": temperature > 0, "pad_token_id": tokenizer.eos_token_id}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": top_k}
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        _continue(model, start, tokens, transcript, settings)
    return transcript.finish()


class Transcript:
    """Tokens of one text, and the part of it that can be shown.

    Decoded as a whole each time, because a tokenizer may decode a token on its own differently than in its place.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Show | None) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._ids: list[int] = []
        self._shown = 0

    def add(self, ids: Sequence[int]) -> None:
        """Adds tokens and shows what they complete."""
        self._ids.extend(ids)
        if self._show:
            self._show_up_to(self._text().rstrip(_INCOMPLETE))

    def finish(self) -> str:
        """Shows the rest, characters that never became whole included, and returns the text."""
        text = self._text()
        self._show_up_to(text)
        return text

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _show_up_to(self, text: str) -> None:
        if self._show and len(text) > self._shown:
            self._show(text[self._shown :])
            self._shown = len(text)


class _Feed:
    """A streamer of transformers that adds to a transcript: first comes the prompt, which stands there already."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._transcript.add(ids.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _continue(
    model: PreTrainedModel, start: Sequence[int], tokens: int, transcript: Transcript, settings: dict[str, Any]
) -> None:
    ids, left = list(start), tokens
    lengths = [getattr(model.config, name, None) for name in ("max_position_embeddings", TRAINED_LENGTH)]
    context = min((length for length in lengths if length), default=len(ids) + tokens)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    while left > 0:
        window = torch.tensor([ids[-max(1, context - min(left, context // 2)) :]], device=model.device)
        output = model.generate(  # type: ignore[operator]
            input_ids=window,
            attention_mask=torch.ones_like(window),
            max_new_tokens=min(left, max(1, context - window.shape[1])),
            streamer=_Feed(transcript),
            **settings,
        )
        new = output[0, window.shape[1] :].tolist()
        if not new or new[-1] in ends:
            return
        ids += new
        left -= len(new)


def _load(export: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mend = "export the run again; a model from model.builder that is no transformers model can only be loaded by hand"
    if not (export / "config.json").is_file():
        raise CheckpointError(543, f"{export} holds no config.json of a transformers model", mend)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(export)
        with no_progress_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                export, dtype="auto" if device == "cuda" else torch.float32
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        detail = " ".join(str(error).split())[:300]
        raise CheckpointError(543, f"{export} cannot be loaded: {detail}", mend) from error
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(
                544,
                f"{export} holds values that are not finite, in {name!r} among others",
                "the run diverged; train again with a lower inner.lr or outer.lr",
            )
    return model.eval().to(device), tokenizer


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    token = tokenizer.eos_token_id
    if token is None:
        raise ConfigError(173, "the prompt is empty and the tokenizer has no end-of-text token", "give a prompt")
    return int(token)


def _check(tokens: int, temperature: float, top_k: int) -> None:
    allowed = {
        f"tokens={tokens}": tokens >= 1,
        f"temperature={temperature}": temperature >= 0 and math.isfinite(temperature),
        f"top_k={top_k}": top_k >= 0,
    }
    for text, fits in allowed.items():
        if not fits:
            raise ConfigError(172, f"{text} is out of range", "use tokens >= 1, temperature >= 0 and top_k >= 0")
