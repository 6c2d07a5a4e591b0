"""Compiling in processes that take their time: each shape has its own, and none outlives the bench."""

import json
import os
import sys
import time

import pytest
import torch

from qdqbench.eval.bench.random_model import random_ids_task
from qdqbench.eval.gpubench import compiling as module
from qdqbench.eval.gpubench.compiling import Compiling, compiling, main
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.rundir.pipeline import open_run
from qdqbench.quantize.rundir.session import RunConfig

CELLS = [((1, 16),), ((8, 16),), ((32, 16),)]
# takes a mode and cells; a cell of batch 8 never ends, batch 32 fails
CHILD = """
import json, sys, time
print("noise of a library", flush=True)
for cell in json.loads(sys.argv[-1]):
    if cell[0][0] == 8:
        time.sleep(60)
    print(json.dumps({"error": "no C compiler" if cell[0][0] == 32 else ""}), flush=True)
"""


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(module, "START_S", 5.0)
    return [sys.executable, "-c", CHILD]


def test_a_shape_that_takes_too_long_does_not_take_the_rest_with_it(child):
    work = Compiling(child, CELLS, 0.3)
    work.compile("default")
    assert work.late == {
        ("default", CELLS[1]): "torch.compile took over 0.3 s a shape (--compile-seconds)",
        ("default", CELLS[2]): "no C compiler",
    }


def test_a_process_that_ends_is_told():
    work = Compiling([sys.executable, "-c", "import sys; sys.exit('no module')"], CELLS[:1], 5)
    work.compile("default")
    assert work.late == {("default", CELLS[0]): "the process that compiles it ended: no module"}


def test_nothing_is_left_running(monkeypatch, tmp_path):
    written = tmp_path / "pid"
    script = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", script))
    with compiling(tmp_path, ["default"], CELLS, 60):
        until = time.monotonic() + 10
        while not (written.is_file() and written.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_the_child_compiles_each_cell_of_a_run(tiny_bert, tmp_path, monkeypatch, capsys):
    task = random_ids_task(str(tiny_bert))
    config = RunConfig(recipe=load_recipe("bert-fp16"), model=str(tiny_bert), task=task, data="none")
    open_run(config, tmp_path / "run")
    asked = []

    def compiled(model, mode, *, dynamic):
        def forward(*, input_ids, attention_mask, token_type_ids):
            asked.append((mode, dynamic, tuple(input_ids.shape), model.dtype, bool(attention_mask.all())))
            if len(input_ids) == 3:
                raise RuntimeError("out of\n memory")

        return forward

    monkeypatch.setattr(module.peers, "compiled_forward", compiled)
    main([str(tmp_path / "run"), "default", json.dumps([[[2, 8]], [[3, 8]], [[2, 8], [2, 16]]])])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"error": ""}, {"error": "out of memory"}, {"error": ""}]
    assert [shape for _, _, shape, _, _ in asked] == [(2, 8), (3, 8), (2, 8), (2, 16)]
    assert [dynamic for _, dynamic, _, _, _ in asked] == [False] * 4
    assert {(mode, dtype, mask) for mode, _, _, dtype, mask in asked} == {("default", torch.float16, True)}
