"""torch.compile of the drafter: when, from which cache, and that nothing changes by it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import CONFIG, drafter

from trainer import compiling
from trainer.blocks import Blocks
from trainer.config import Settings


@pytest.mark.parametrize(
    ("choice", "device", "wanted"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("on", "cpu", True),
        ("off", "cuda", False),
    ],
)
def test_a_gpu_compiles_unless_told_otherwise(choice: str, device: str, wanted: bool) -> None:
    assert compiling.wanted(choice, torch.device(device)) is wanted


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")


@pytest.mark.usefixtures("_environment")
def test_the_cache_is_found_again_and_only_this_one_is_emptied(tmp_path: Path) -> None:
    of: dict[str, Any] = compiling.facts(torch.device("cpu"), CONFIG)
    place = compiling.cache_directory(tmp_path, of)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{place}/inductor"
    assert os.environ["TRITON_CACHE_DIR"] == f"{place}/triton"
    (place / "inductor").mkdir()
    others = [
        compiling.cache_directory(tmp_path, {**of, "torch": "9.9"}),
        compiling.cache_directory(
            tmp_path, compiling.facts(torch.device("cpu"), dataclasses.replace(CONFIG, block_size=8))
        ),
    ]
    for other in others:
        (other / "inductor").mkdir()
    assert len({place, *others}) == 3
    assert compiling.cache_directory(tmp_path, of) == place
    assert (place / "inductor").exists()
    assert compiling.cache_directory(tmp_path, of, fresh=True) == place
    assert not (place / "inductor").exists()
    assert all((other / "inductor").exists() for other in others)


def test_other_code_has_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling.facts(torch.device("cpu"), CONFIG)
    for name in compiling.CODE:
        (tmp_path / f"{name}.py").write_text("other")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))
    assert compiling.facts(torch.device("cpu"), CONFIG)["code"] != before["code"]


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_compiled_drafting_is_the_same_and_what_was_compiled_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the backend that only traces: a C++ compiler would take a minute. By hand: --compile on."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    made = drafter(dataclasses.replace(CONFIG, num_hidden_layers=1))
    cpu, settings = torch.device("cpu"), Settings(target_model="toy", cache_dir=str(tmp_path))
    plain = compiling.Drafting(made, settings, cpu, print)
    assert (plain.compiled, plain.cache) == (False, None)
    blocks = Blocks.build([0, 1], [3, 9], 4)
    embeddings, taps = torch.randn(2, 4, 32), torch.randn(2, 24, 64)
    given = (embeddings, blocks, taps, torch.tensor([1, 2, 3, 5, 7]))

    def results(draft: compiling.Drafting) -> tuple[torch.Tensor, ...]:
        found = draft(*given)
        return found, *torch.autograd.grad(found.square().sum(), list(made.parameters()))

    pieces = []
    for recompute in (False, True):
        torch._dynamo.reset()
        count = compiling.Compilations()
        asked = dataclasses.replace(settings, compile="on", recompute=recompute)
        compiled = compiling.Drafting(made, asked, cpu, print)
        assert compiled.cache is not None
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{compiled.cache}/inductor"
        for ours, theirs in zip(results(compiled), results(plain), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
        pieces.append(count.new())
        assert count.new() == 0
    assert pieces[1] >= pieces[0] > 0  # what is computed twice is compiled, too
