"""What takes time in making a toy: its tokenizer, its target, the target's completions.

The target is small, so it is made to know a little text very well rather than much text badly: it
continues it properly instead of going round in circles, which would be easy to draft for and prove
nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.completions import Document, write_completions
from trainer.modeldir import tokenizer_digest
from trainer.optim import Optimizer
from trainer.speculative import plain
from trainer.target import Target

if TYPE_CHECKING:
    from trainer.toy import Recipe

END, MASK = "<eos>", "<|mask|>"
END_ID = 0
PERIOD = 2.0  # s between reports
WARMUP, DECAY = 30, 0.6  # steps that warm up; part of the schedule in which the rates fall

Report = Callable[[str], None]


def make(
    recipe: Recipe, known: Sequence[str], held_out: Sequence[str], directory: Path, report: Report
) -> dict[str, Any]:
    """Write target/, data/ and prompts.json into `directory`; returns how long each part took and the
    like.
    """
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer(known, recipe.vocab_size)
    streams = [[*encoded.ids, END_ID] for encoded in tokenizer.encode_batch(list(known))]
    stream = torch.tensor([token for part in streams for token in part])
    report(
        f"toy: {len(known)} files of the standard library, {sum(map(len, known)) / 1e3:.0f} kB, "
        f"{len(stream):,} tokens, vocabulary {tokenizer.get_vocab_size():,}"
    )
    model = new_model(recipe, tokenizer.get_vocab_size())
    loss, steps = train(model, stream, recipe, report)
    trained = time.monotonic()

    home = directory / "target"
    save(model, tokenizer, home)
    generator = torch.Generator().manual_seed(recipe.seed)
    cuts = starts(streams, recipe.prompt + recipe.completion, generator)
    split = min(recipe.documents, len(cuts) - recipe.evaluation_prompts)
    prompts = [stream[start : start + recipe.prompt].tolist() for start in cuts]
    documents = list(completions(Target(model), prompts[:split], recipe, report))
    meta = {"tokenizer": tokenizer_digest(home), "target": "toy"}
    write_completions(directory / "data", documents, meta)
    unseen = held_out_prompts(tokenizer, held_out, recipe)
    fresh = prompts[split : split + recipe.evaluation_prompts]
    (directory / "prompts.json").write_text(
        json.dumps({"known": fresh, "held_out": unseen}) + "\n", encoding="utf-8"
    )
    return {
        "tokens": len(stream),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "loss": loss,
        "documents": len(documents),
        "seconds": {"target": trained - began, "completions": time.monotonic() - trained},
    }


# -- tokenizer ---------------------------------------------------------------------------------------------


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE: ``<eos>`` is token 0 and ``<|mask|>``, which no text contains, the last one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([MASK])
    return tokenizer


# -- target ------------------------------------------------------------------------------------------------


def new_model(recipe: Recipe, vocab_size: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            head_dim=recipe.hidden_size // recipe.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    )


def save(model: Any, tokenizer: Any, home: Path) -> None:
    """Write a model directory as `transformers` reads it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(home)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, mask_token=MASK, pad_token=END
    )
    wrapped.save_pretrained(home)


def train(model: Any, stream: Tensor, recipe: Recipe, report: Report) -> tuple[float, int]:
    """Train on random windows of `stream`; returns the loss at the end (mean over about 20 steps) and the
    steps done.

    The schedule is one of steps; on a slow machine it is cut to `recipe.seconds` and still ends with low
    rates.
    """
    optimizer = Optimizer(model, weight_decay=0.0, kind="muon")
    generator = torch.Generator().manual_seed(recipe.seed)
    began = said = time.monotonic()
    mean, step = float("nan"), 0
    model.train()
    while True:
        elapsed = time.monotonic() - began
        done = max(step / recipe.steps, elapsed / recipe.seconds)
        if done >= 1:
            break
        if step and time.monotonic() - said >= PERIOD:
            said = time.monotonic()
            report(f"toy target {elapsed:.0f} s of {elapsed / done:.0f} s, loss {mean:.2f}")
        first = torch.randint(len(stream) - recipe.sequence, (recipe.batch, 1), generator=generator)
        window = stream[first + torch.arange(recipe.sequence + 1)]
        logits = model(input_ids=window[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        factor = min(1.0, (step + 1) / WARMUP) * max(0.02, min(1.0, (1 - done) / DECAY))
        optimizer.step(recipe.rate * factor, divisor=1.0, clip=1.0)
        mean = loss.item() if step == 0 else 0.9 * mean + 0.1 * loss.item()
        step += 1
    report(f"toy target trained: {step} steps in {elapsed:.0f} s, loss {mean:.2f}")
    model.eval().requires_grad_(False)
    return mean, step


# -- prompts and completions -------------------------------------------------------------------------------


def starts(streams: Sequence[Sequence[int]], length: int, generator: torch.Generator) -> list[int]:
    """Positions in the joined streams from which `length` tokens stay inside one file, in random order."""
    found: list[int] = []
    offset = 0
    for part in streams:
        found += range(offset, offset + len(part) - length)
        offset += len(part)
    order = torch.randperm(len(found), generator=generator)
    return [found[i] for i in order.tolist()]


def held_out_prompts(tokenizer: Any, texts: Sequence[str], recipe: Recipe) -> list[list[int]]:
    """Evenly spread cuts of files that the target has not seen."""
    each = -(-recipe.evaluation_prompts // len(texts))
    found = []
    for encoded in tokenizer.encode_batch(list(texts)):
        ids = encoded.ids
        for number in range(each):
            start = (number + 1) * (len(ids) - recipe.prompt) // (each + 1)
            found.append(ids[start : start + recipe.prompt])
    return found[: recipe.evaluation_prompts]


def completions(
    target: Target, prompts: Sequence[Sequence[int]], recipe: Recipe, report: Report
) -> Iterator[Document]:
    """Each prompt with the target's greedy continuation; the mask marks what the target wrote."""
    began = said = time.monotonic()
    for first in range(0, len(prompts), recipe.side_by_side):
        if time.monotonic() - said >= PERIOD:
            said = time.monotonic()
            report(f"toy completions {first} of {len(prompts)}, {said - began:.0f} s")
        group = prompts[first : first + recipe.side_by_side]
        for text in plain(target, group, recipe.completion, stop=(END_ID,))[0]:
            yield text.tokens, [0] * text.prompt + [1] * len(text.continuation)
    seconds = time.monotonic() - began
    report(f"toy completions: {len(prompts)} in {seconds:.0f} s")
