"""Tests that the examples of docs/how-to/migrate.md run, and that the names of widepack on it exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from paths import ROOT

import widepack
from widepack.layers.catalog import LAYERS
from widepack.registry.registry import strategy_names
from widepack_bench.layers.block_sweeps import sweeps
from widepack_bench.layers.sweeps import find
from widepack_bench.models.blocks import BLOCKS
from widepack_bench.suite.rows import chosen
from widepack_cli.main import cli

PAGE = (ROOT / "docs" / "how-to" / "migrate.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
EXPORTS = """
compile WideBuilder pack unpack WideConfig get_default_config set_default_config register unregister
get_registry list_registered TracedWideModel FunctionalOp BinaryOp
print_trace pack_inputs unpack_outputs benchmark_primitive benchmark_multi benchmark_all benchmark_custom
list_benchmark_primitives BenchmarkResult SweepParams
convert_ops get_hfta_op_for get_hfta_optim_for get_hfta_lr_scheduler_for Adam Adadelta StepLR
PartiallyFusedAdam PartiallyFusedAdadelta PartiallyFusedStepLR
index_array_or_return_scalar consolidate_hyperparams_and_determine_B stack_module_state functional_call vmap
in_dims out_dims randomness chunk_size
"""  # of wide_compiler, hfta and torch.func, but for layers and blocks
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]


@pytest.mark.extended
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space: dict[str, Any] = {"__name__": "migration"}
    for code in CODE:
        exec(compile(code, "migrate.md", "exec"), space)
    assert space["y"].shape == (4, 8, 10)
    assert [list(o.shape) for o in space["outputs"]] == [[8, 10]] * 4
    assert isinstance(space["ens"], widepack.WideModel)
    assert type(space["best"]) is type(space["models"][0])


def test_names_of_widepack_exist() -> None:
    names = set(re.findall(r"\b(widepack(?:_bench)?(?:\.[A-Za-z]\w*)+)", PAGE))
    assert len(names) > 12
    for name in names:
        parts, at = name.split("."), import_module(name.split(".")[0])
        for i, part in enumerate(parts[1:], 1):
            if not hasattr(at, part):
                import_module(".".join(parts[: i + 1]))
            at = getattr(at, part)


def test_methods_of_a_fused_module_and_keywords_exist() -> None:
    methods = {m for text in INLINE for m in re.findall(r"\bfused\.(\w+)", text)}
    assert methods >= {"each", "save", "unfuse", "copy_"}
    for method in methods:
        assert hasattr(widepack.Fused, method), method
    import inspect

    for name, words in re.findall(r"widepack\.(fuse|load|build)\(([^`]*?)\)`", PAGE):
        known = inspect.signature(getattr(widepack, name)).parameters
        for keyword in re.findall(r"\b(\w+)=", words):
            assert keyword in known, (name, keyword)


def test_commands_and_their_options_exist() -> None:
    commands = [text for text in INLINE if re.match(r"widepack [a-z]", text)]
    assert len(commands) > 8
    for text in commands:
        _, name, *words = text.split()
        context = click.Context(cli)
        command = cli.get_command(context, name)
        assert command is not None, text
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for word in words:
            assert not word.startswith("-") or word in options, text


def test_strategies_and_wide_layers_exist() -> None:
    start = PAGE.index("Strategies have these names here")
    table = PAGE[start : PAGE.index("What else differs", start)]
    named = {
        n for row in re.findall(r"\|[^|\n]*\| ([^|\n]*)\|\n", table) for n in re.findall(r"`(\w+)`", row)
    }
    assert len(named) > 8
    assert named <= strategy_names()
    wide = {n for row in ROWS for n in re.findall(r"\b(Wide[A-Z]\w+)", row[-1])}
    assert wide and wide - {"WideAttention"} <= set(LAYERS)  # the page says that it has another name here
    for block in re.findall(r"block:(\w+)", PAGE):
        assert block in BLOCKS


def test_every_export_of_the_other_packages_has_a_row() -> None:
    left = {
        word for row in ROWS for text in re.findall(r"`([^`]+)`", row[0]) for word in re.findall(r"\w+", text)
    }
    assert not set(EXPORTS.split()) - left


def test_layers_rows_and_models_of_the_commands_exist() -> None:
    layers = re.findall(r"widepack bench-layers ((?:[\w:]+ ?)+)(?=[`-]| )", PAGE)
    assert len(layers) > 6 and all(find(name, sweeps()) for names in layers for name in names.split())
    rows = [name for names in re.findall(r"--rows ([\w,-]+)", PAGE) for name in names.split(",")]
    assert [row.name for row in chosen(rows)] == rows != []
    models = re.findall(r"(widepack_bench\.models\.\w+):(\w+)", PAGE)
    assert len(models) == 2 and all(
        isinstance(getattr(import_module(file), name)(), torch.nn.Module) for file, name in models
    )


def test_a_rate_is_read_as_on_the_page() -> None:
    optimizer = widepack.optim.Adam([torch.nn.Parameter(torch.zeros(3, 2))], lr=[0.1, 0.2, 0.3])
    assert list(optimizer.param_groups[0]["lr"])[1] == 0.2
