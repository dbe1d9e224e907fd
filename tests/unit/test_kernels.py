"""Fast kernels of recurrent targets: named where they are missing, and required on request."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

from trainer.errors import InputError
from trainer.kernels import DISTRIBUTIONS, _packages, kernels

QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    },
}
LACKING = (
    "24 of the target's 32 layers are recurrent · flash-linear-attention missing, causal-conv1d missing: "
    "PyTorch's own code is slow there; pip install flash-linear-attention causal-conv1d"
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put modules of these names and texts where Python finds them."""

    def put(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for name in DISTRIBUTIONS:
        sys.modules.pop(name, None)


def test_what_is_missing_is_named_with_what_installs_it() -> None:
    found = kernels(QWEN3_5)
    assert found.line() == LACKING
    with pytest.raises(InputError) as caught:
        found.require()
    assert str(caught.value).startswith(
        "--require-fast-kernels: flash-linear-attention and causal-conv1d cannot"
    )
    assert str(caught.value).endswith(": pip install flash-linear-attention causal-conv1d")


def test_what_is_there_is_active_unless_it_cannot_be_imported(installed: Callable[..., None]) -> None:
    installed(fla="", causal_conv1d="raise ImportError('built for another torch')")
    assert kernels(QWEN3_5).complete, "nothing is imported for a mere check"
    found = kernels(QWEN3_5, load=True)
    assert found.active == ("flash-linear-attention",)
    assert "causal-conv1d cannot be imported (built for another torch)" in str(found.line())
    with pytest.raises(InputError, match=r"pip install causal-conv1d$"):
        found.require()
    installed(causal_conv1d="")
    assert kernels(QWEN3_5, load=True).line() == (
        "24 of the target's 32 layers are recurrent · flash-linear-attention active, causal-conv1d active"
    )


def test_targets_without_recurrent_layers_are_not_spoken_of() -> None:
    found = kernels({"model_type": "qwen3", "num_hidden_layers": 36})
    assert found.line() is None
    found.require()


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "qwen3_next", "num_hidden_layers": 48, "linear_num_key_heads": 16}, 36),
        ({"model_type": "qwen3_next", "num_hidden_layers": 9, "linear_num_key_heads": 1,
          "full_attention_interval": 3}, 6),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, 1),
        ({"model_type": "falcon_mamba", "num_hidden_layers": 5, "mamba_d_conv": 4}, 5),
    ],
)  # fmt: skip
def test_recurrent_layers_are_counted_as_configs_write_them(config: dict, count: int) -> None:
    assert kernels(config).recurrent == count


@pytest.mark.parametrize(
    ("model_type", "packages"),
    [
        ("qwen3_next", ["fla", "causal_conv1d"]),
        ("qwen3_5_text", ["fla", "causal_conv1d"]),
        ("qwen3_5_moe_text", ["fla", "causal_conv1d"]),
        ("jamba", ["causal_conv1d", "mamba_ssm"]),
        ("lfm2", ["causal_conv1d"]),
        ("minimax", []),
        ("of somebody's own", ["fla", "causal_conv1d"]),
    ],
)
def test_transformers_own_code_says_which_packages_it_takes_kernels_from(
    model_type: str, packages: list[str]
) -> None:
    assert _packages(model_type) == packages


def test_a_check_of_the_settings_names_them_too(tmp_path: Path) -> None:
    from trainer import config
    from trainer.__main__ import config_check

    target = tiny.target_directory(tmp_path / "target", tiny.qwen3_5_with_vision())
    data = tiny.data_directory(tmp_path / "data", target, 3)
    flags = tiny.flags(target, data, tmp_path / "out")
    described, line, *_ = config_check(config.parse(flags).settings).splitlines()
    assert "4 layers, width 32" in described
    assert line.startswith("2 of the target's 4 layers are recurrent · flash-linear-attention missing")
    with pytest.raises(InputError, match="--require-fast-kernels"):
        config_check(config.parse([*flags, "--require-fast-kernels"]).settings)
