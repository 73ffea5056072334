"""`python -m tools.recipes` on small checkouts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.recipes.__main__ import main
from tools.recipes.bridge import bridge
from tools.recipes.files import megatron_lm, primus, values_of

BRIDGE = {
    "recipes/__init__.py": "from megatron.bridge.recipes.llama.small import *\n",
    "recipes/common.py": """
import no_such_package
from no_such_package.parts import Part
from megatron.bridge.training.config import ConfigContainer, TrainingConfig

def _common():
    return ConfigContainer(model=None, train=TrainingConfig(train_iters=5), ddp=None, mixed_precision="bf16_mixed")
""",
    "recipes/llama/small.py": """
from typing import override
from megatron.bridge import AutoBridge
from megatron.bridge.models.made_up import GivenProvider
from megatron.bridge.recipes.common import _common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.core.transformer import TransformerConfig, NotInThisRelease

def plain_pretrain_config():
    cfg = _common()
    cfg.model = AutoBridge.from_hf_pretrained("none/such").to_megatron_provider(load_weights=False)
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.train.train_iters += 1
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_param_gather_with_optimizer_step=True)
    cfg.logger.log_interval = cfg.model.mtp_num_layers or 1
    return cfg

def layout_pretrain_config():
    cfg = plain_pretrain_config()
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.pipeline_model_parallel_layout = [["embedding"] + ["decoder"] * 3, ["decoder"] * 2 + ["mtp", "loss"]]
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=None, overlap_moe_expert_parallel_comm=True)
    return cfg

def refused_pretrain_config():
    cfg = _common()
    cfg.model = GivenProvider(num_layers=8, pipeline_model_parallel_size=2, moe_paged_stash=True)
    cfg.model.cpu_offloading = True
    return cfg

def without_pipeline_config():
    cfg = _common()
    cfg.model = GivenProvider(num_layers=8)
    return cfg

def broken_config():
    return _common().model.num_layers

def made_from_config(name):
    raise AssertionError("it is a part of recipes")
""",
    "models/made_up.py": "raise AssertionError('only recipes are executed')\n",
}
CASE = """
ENV_VARS: {A: 1}
MODEL_ARGS:
  --train-iters: 50
  --num-layers: 12
  --pipeline-model-parallel-size: 4
  --micro-batch-size: 1
  --no-rope-fusion: true
  --sequence-parallel: false
  --moe-layer-freq: ([0]*1+[1]*3)
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    cases = {
        "gpt/layout": f"{CASE}  --pipeline-model-parallel-layout: Ettt|(ttt|)*2tttL\n",
        "moe/by_layers": f"{CASE}  --num-layers-per-virtual-pipeline-stage: 1\n  --cpu-offloading-num-layers: 1\n",
        "moe/graphs": f"{CASE}  --cuda-graph-impl: transformer_engine\n  --cuda-graph-warmup-steps: 0\n",
        "gpt/inference": "MODEL_ARGS: {--pipeline-model-parallel-size: 4}\n",
    }
    return [
        write(tmp_path / "bridge", {f"src/megatron/bridge/{name}": text for name, text in BRIDGE.items()}),
        write(
            tmp_path / "lm",
            {f"tests/functional_tests/test_cases/{name}/model_config.yaml": text for name, text in cases.items()},
        ),
        write(
            tmp_path / "primus",
            {
                "primus/configs/modules/megatron/base.yaml": "pipeline_model_parallel_size: 2\nuse_torch_fsdp2: true\n",
                "primus/configs/modules/megatron/trainer.yaml": "extends: [base.yaml]\nuse_torch_fsdp2: false\n",
                "primus/configs/models/megatron/small.yaml": "num_layers: 6\n",
                "examples/megatron/configs/CARD/small_1B-BF16.yaml": "modules: {pre_trainer: {framework: megatron, "
                "config: trainer.yaml, model: '${MODEL:small}.yaml', overrides: {recompute_num_layers: ${N:${M:3}}}}}",
                "examples/megatron/configs/CARD/sharded.yaml": "modules: {pre_trainer: {framework: megatron, "
                "config: base.yaml, model: small.yaml}}",
                "examples/megatron/configs/CARD/lost.yaml": "modules: {pre_trainer: {framework: megatron, "
                "config: trainer.yaml, model: lost.yaml}}",
            },
        ),
    ]


def test_every_recipe_gets_a_verdict_by_schedule(checkouts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = checkouts[0] / "page.md"
    page.write_text("Before.\n<!-- recipes: begin -->\nold\n<!-- recipes: end -->\nBehind.\n")
    before = set(sys.modules)
    assert main([*map(str, checkouts), "--markdown", str(page)]) == 0
    assert not [name for name in set(sys.modules) - before if "bridge" in name.split(".")[:2] or "no_such" in name]
    printed = capsys.readouterr().out
    for line in (
        "llama/recipes/plain_pretrain_config  auto  accepted",
        "llama/recipes/plain_pretrain_config  zb-h1  adapted: set virtual_pipeline_model_parallel_size=None and "
        "pipeline_model_parallel_layout=None in its configuration, and overlap_param_gather_with_optimizer_step=False, which "
        "takes several chunks",
        "llama/recipes/layout_pretrain_config  auto  adapted: turned off: overlap_moe_expert_parallel_comm",
        "llama/recipes/layout_pretrain_config  zbv  adapted: set virtual_pipeline_model_parallel_size=2 and "
        "pipeline_model_parallel_layout='Ett|t|tt|mL' in its configuration; turned off: overlap_moe_expert_parallel_comm",
        "llama/recipes/refused_pretrain_config  zb-h1  refused: moe_paged_stash; cpu_offloading",
        "llama/recipes/broken_config  not read: AttributeError: 'NoneType' object has no attribute 'num_layers'",
        "5 recipes, 3 with a pipeline, 1 not read; auto: 1 accepted, 1 adapted, 1 refused; "
        "zb-h1: 0 accepted, 2 adapted, 1 refused; zbv: 0 accepted, 2 adapted, 1 refused",
        "gpt/layout  auto  accepted",
        "gpt/layout  zbv  adapted: without --pipeline-model-parallel-layout 'Ettt|(ttt|)*2tttL' and with "
        "--pipeline-model-parallel-layout 'Ett|t|tt|t|tt|t|tt|tL': zbv takes 2 model chunks per rank",
        "moe/by_layers  zb-h1  adapted: without --num-layers-per-virtual-pipeline-stage 1: zb-h1 takes one model chunk",
        "moe/graphs  auto  refused: cuda_graph_warmup_steps",
        "3 recipes, 3 with a pipeline, 0 not read",
        "small/CARD/small_1B-BF16  zb-h1  accepted",
        "sharded/CARD/sharded  auto  refused: use_torch_fsdp2",
        "lost/CARD/lost  not read: ",
    ):
        assert line in printed, printed
    text = page.read_text()
    assert text.startswith("Before.\n<!-- recipes: begin -->\n\nRecipes with a pipeline that ")
    assert text.endswith("<!-- recipes: end -->\nBehind.\n")
    assert "old" not in text
    assert "\n| Megatron-Bridge | 3 | 2 | 2 | 2 |\n" in text
    assert "| llama | 3 | 1 / 1 / 1 | 0 / 2 / 1 | 0 / 2 / 1 |" in text
    assert "| `moe_paged_stash` | 1 | 1 | 1 | it restores the inputs of experts before B" in text


def test_a_folder_that_is_none_of_them_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} has none of src/megatron/bridge/recipes, tests/functional_tests/test_cases, primus/configs: give "
        "checkouts of Megatron-Bridge, Megatron-LM or Primus\n"
    )


def test_values_are_what_is_written(checkouts: list[Path]) -> None:
    plain = next(each for each in bridge(checkouts[0]) if each.name == "recipes/plain_pretrain_config")
    assert plain.values["virtual_pipeline_model_parallel_size"] == 5
    layout, by_layers, _ = megatron_lm(checkouts[1])
    assert layout.values["moe_layer_freq"] == "([0]*1+[1]*3)"
    assert layout.values["rope_fusion"] is False
    assert "sequence_parallel" not in layout.values
    assert by_layers.values["virtual_pipeline_model_parallel_size"] == 3
    small = next(each for each in primus(checkouts[2]) if each.name == "CARD/small_1B-BF16")
    assert (small.values["num_layers"], small.values["recompute_num_layers"]) == (6, 3)
    assert small.values["use_torch_fsdp2"] is False
    words = "--num-experts=8 --cuda-graph-scope attn moe_router --pipeline-model-parallel-size 2 --hybrid-layer-pattern M|*|M|-"
    assert values_of(words.split()) == {
        "num_moe_experts": 8,
        "cuda_graph_scope": "attn moe_router",
        "pipeline_model_parallel_size": 2,
        "hybrid_layer_pattern": "M|*|M|-",
        "virtual_pipeline_model_parallel_size": 2,
    }
