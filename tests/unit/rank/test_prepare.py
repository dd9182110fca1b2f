"""What ctx.prepare makes of a model: device, precision, compilation, memory format, DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddptrain.rank.prepare import prepare_model, use_compile_cache
from tests.unit.rank.ranks import CPU, MakeRank, make_rank
from tests.unit.specs import make_spec

__all__ = ["make_rank"]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def bare(ready: nn.Module) -> nn.Module:
    assert isinstance(ready, DistributedDataParallel)
    inner: nn.Module = ready.module
    return inner


def test_plain_model_is_wrapped_and_unchanged() -> None:
    ready, images = prepare_model(model(), CPU, {}), torch.ones(2, 3, 4, 4)
    assert torch.equal(ready(images), model()(images))
    assert bare(ready)[0].weight.is_contiguous()  # type: ignore[index]
    assert bare(ready)._compiled_call_impl is None


def test_channels_last_changes_the_memory_format_of_convolutions_and_no_value() -> None:
    ready = prepare_model(model(), CPU, {"channels_last": True})
    weight = bare(ready)[0].weight  # type: ignore[index]
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert torch.equal(weight, model().state_dict()["0.weight"])
    assert bare(prepare_model(model(), CPU, {"channels_last": False}))[0].weight.is_contiguous()  # type: ignore[index]


def test_bf16_computes_under_autocast_and_keeps_weights_and_their_names() -> None:
    images = torch.ones(2, 3, 4, 4)
    ready = prepare_model(model(), CPU, {"precision": "bf16"})
    assert ready(images).dtype == torch.bfloat16
    assert {value.dtype for value in bare(ready).state_dict().values()} == {torch.float32}
    assert bare(ready).state_dict().keys() == model().state_dict().keys()
    assert prepare_model(model(), CPU, {"precision": "fp32"})(images).dtype == torch.float32


def test_model_without_trainable_parameters_is_not_wrapped() -> None:
    mine = model().requires_grad_(False)
    assert prepare_model(mine, CPU, {}) is mine


def test_arguments_of_ddp_are_passed_on() -> None:
    ready = prepare_model(model(), CPU, {}, find_unused_parameters=True, gradient_as_bucket_view=True)
    assert isinstance(ready, DistributedDataParallel)
    assert (ready.find_unused_parameters, ready.gradient_as_bucket_view) == (True, True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (torch.bfloat16, True)),
        ({"precision": "fp32"}, (torch.float32, True)),
        ({"channels_last": False}, (torch.bfloat16, False)),
        ({"precision": None, "channels_last": None}, (torch.bfloat16, True)),
    ],
)
def test_arguments_of_ctx_prepare_come_before_the_configuration(
    make_rank: MakeRank, said: dict[str, Any], expected: tuple[torch.dtype, bool]
) -> None:
    ready = make_rank(precision="bf16", channels_last=True).context.prepare(model(), **said)
    is_channels_last = not bare(ready)[0].weight.is_contiguous()  # type: ignore[index]
    assert (ready(torch.ones(1, 3, 4, 4)).dtype, is_channels_last) == expected


def test_model_is_wrapped_only_once() -> None:
    plain = model()
    ready = prepare_model(plain, CPU, {})
    for again in (ready, plain):
        with pytest.raises(ValueError, match=r"was called with this model before: call it once"):
            prepare_model(again, CPU, {})
    with pytest.raises(ValueError, match="a model in DistributedDataParallel: give it the model inside"):
        prepare_model(DistributedDataParallel(model()), CPU, {})


# --- where compiled code is kept, and who may own that folder ---


@pytest.mark.parametrize(
    ("chosen", "is_unusable", "used"),
    [
        ("", False, "the user's cache"),
        ("/tmp/torchinductor_someone", False, "the user's cache"),  # torch's default
        ("/mine", False, "as chosen"),
        ("", True, "staging"),
    ],
)
def test_folder_of_compiled_code_is_private_or_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, is_unusable: bool, used: str
) -> None:
    root, spec = tmp_path / "ddptrain" / "compile", make_spec(env={"TORCHINDUCTOR_CACHE_DIR": chosen} if chosen else {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    if is_unusable:
        root.parent.mkdir()
        root.write_text("a file")
    use_compile_cache(spec)
    folders = {"the user's cache": str(root), "as chosen": chosen, "staging": str(Path(spec.host.staging) / "compile")}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folders[used]
    assert used != "the user's cache" or root.stat().st_mode & 0o777 == 0o700
