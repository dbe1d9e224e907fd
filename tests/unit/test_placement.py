"""A target over several devices: which part lies where, and that it computes what it does on one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer import target as target_module
from trainer.errors import InputError
from trainer.placement import needed, spread
from trainer.target import Target, choose_devices, placed

KINDS = ["qwen3", "llama", "qwen3_5", "qwen3_5_with_vision"]
AMPLE = [1e9, 1e9]


def all_ways(layers: list[int], first: int, last: int, room: list[float]) -> float:
    """The smallest largest share, by trying every division into runs of layers."""
    found = []
    for cuts in itertools.combinations_with_replacement(range(len(layers) + 1), len(room) - 1):
        ends = [0, *cuts, len(layers)]
        loads = [sum(layers[a:b]) for a, b in itertools.pairwise(ends)]
        loads[0] += first
        loads[-1] += last
        found.append(max(load / size for load, size in zip(loads, room, strict=True)))
    return min(found)


@pytest.mark.parametrize(
    ("layers", "first", "last", "room"),
    [
        ([10] * 8, 0, 0, [100.0, 100.0]),
        ([10] * 8, 35, 1, [100.0, 100.0]),
        ([10, 30, 10, 30, 10, 30, 10], 20, 2, [100.0, 50.0, 100.0]),
        ([5] * 9, 90, 0, [100.0, 100.0, 100.0]),
        ([7, 1, 1, 1, 40, 2], 3, 3, [60.0, 20.0]),
    ],
)
def test_layers_are_divided_in_their_order_and_as_evenly_as_can_be(
    layers: list[int], first: int, last: int, room: list[float]
) -> None:
    devices, share = spread(layers, first, last, room)
    assert devices == sorted(devices)
    loads = [sum(size for size, where in zip(layers, devices, strict=True) if where == d)
             for d in range(len(room))]  # fmt: skip
    loads[0] += first
    loads[-1] += last
    assert max(load / size for load, size in zip(loads, room, strict=True)) == pytest.approx(share)
    assert share == pytest.approx(all_ways(layers, first, last, room))


def test_how_many_devices_a_target_needs() -> None:
    layers = [10] * 8
    assert needed(layers, 20, 0, each=0, room=100) == 1
    assert needed(layers, 20, 0, each=1, room=100) == 2
    assert needed(layers, 20, 0, each=60, room=100) == 3
    assert needed(layers, 20, 0, each=85, room=100) is None, "the first does not hold what only it can"
    assert needed(layers, 20, 0, each=100, room=100) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_place_and_the_first_has_both_ends(kind: str, tied: bool) -> None:
    if kind == "qwen3_5_with_vision" and tied:
        model: Any = tiny.qwen3_5_with_vision()
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    else:
        model = getattr(tiny, kind)(**({"tie_word_embeddings": True} if tied else {}))
    found, share = placed(model, ["a", "b"], AMPLE)
    assert share < 1
    place_of: dict[str, str] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        holders = [part for part in found if name.startswith(f"{part}.")]
        assert len(holders) == 1, name
        place_of[name] = found[holders[0]]
    ends = {name for name in place_of if "embed_tokens" in name or "lm_head" in name}
    assert len(ends) == 2
    assert {place_of[name] for name in ends} == {"a"}
    of_layers = [place for name, place in place_of.items() if ".layers." in name]
    assert set(of_layers) <= {"a", "b"}
    assert of_layers == sorted(of_layers)
    assert of_layers[-1] == "b"
    assert [found[part] for part in found if part.endswith(".norm")] == ["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_spread_target_gives_what_one_on_one_device_does(tmp_path: Path, kind: str) -> None:
    directory = tiny.target_directory(tmp_path / "a", getattr(tiny, kind)())
    whole, parts = Target.load(directory), Target.load(directory, device=choose_devices("cpu+cpu"))
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    for target in (whole, parts):
        target.tap((0, 2))
    for one, other in zip(whole.features(ids), parts.features(ids), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole.embed(ids), parts.embed(ids))
    assert torch.equal(whole.lm_head, parts.lm_head)
    with torch.no_grad():
        assert torch.equal(whole.model(input_ids=ids).logits, parts.model(input_ids=ids).logits)


class Fake:
    """A target over two devices that differ: sizes are computed and numbers are not, so that torch refuses a
    product over both as it would on two GPUs.
    """

    def __init__(self, kind: str) -> None:
        model = getattr(tiny, kind)().requires_grad_(False)
        self.devices = torch.device("cpu"), torch.device("meta")
        for name, place in placed(model, [str(one) for one in self.devices], AMPLE)[0].items():
            for part in model.get_submodule(name).modules():  # accelerate cannot move a fake one
                for key, value in part._parameters.items():
                    part._parameters[key] = None if value is None else nn.Parameter(value.to(place), False)
                for key, value in part._buffers.items():
                    part._buffers[key] = None if value is None else value.to(place)
        self.target = Target(target_module._spread_over(model, self.devices, AMPLE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_hidden_states_go_from_device_to_device_and_come_back_to_the_first(kind: str) -> None:
    with FakeTensorMode():
        fake = Fake(kind)
        target, (first, second) = fake.target, fake.devices
        target.tap((0, 1, 2))
        layers = target.decoder.layers
        where = [next(layer.parameters()).device for layer in layers]
        assert (where[-1], target.device, target.decoder.norm.weight.device) == (second, first, second)
        ids = torch.randint(0, 90, (2, 12), device=first)
        outputs: list[torch.device] = []
        hook = layers[2].register_forward_hook(lambda *given: outputs.append(given[2].device))
        for positions in (None, torch.arange(12).remainder(6).expand(2, 12)):
            taps, last = target.features(ids, positions)
            assert (taps.shape, last.shape) == ((2, 12, 3 * 32), (2, 12, 32))
            assert (taps.device, last.device) == (first, first)
        hook.remove()
        assert outputs == [second, second]
        assert target.embed(ids).device == first
        assert target.head(last).device == first
        assert target.model(input_ids=ids, use_cache=False).logits.device == first


def test_a_target_that_its_devices_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.target_directory(tmp_path / "a")
    monkeypatch.setattr(target_module, "_free", lambda _device: 30e3)
    with pytest.raises(InputError) as caught:
        Target.load(directory, device=choose_devices("cpu+cpu"))
    assert "--target-gpus cpu+cpu: the target's weights take 0.2 MB" in str(caught.value)
    assert "30.0 KB + 30.0 KB are free" in str(caught.value)
