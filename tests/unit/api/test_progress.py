"""Progress bars of the Python API: asked for, or in a notebook; else nothing is printed."""

import sys
from types import SimpleNamespace

import pytest

from qdqbench import UserError
from qdqbench import _progress as bars
from qdqbench.eval.runs.run import StageProgress
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.trackers import LogRow


def told(progress, draw, *calls):
    with bars.shown(progress, draw) as show:
        for call in calls:
            show(*call)
            report_phase("bias correction", 3, 6)


STAGES = (
    (StageProgress("quantize", number=3, of=9),),
    (StageProgress("quantize", 5, 8, number=3, of=9),),
    (StageProgress("", said="quantize made again"),),
    (StageProgress("export", reused=True, number=4, of=9),),
)


@pytest.mark.parametrize(
    ("draw", "calls", "wanted"),
    [
        (bars.draw_stages, STAGES, ("3 of 9: quantize", "5/8", "made again", "4 of 9: export (unchanged)")),
        (bars.draw_samples, ((8,), (8,)), ("calibration samples: 16it",)),
        (
            bars.draw_seeds,
            ((0, LogRow(step=4, epoch=0.4, loss=0.5), 9), (1, LogRow(step=9, epoch=1), 9)),
            ("seed 1: 100%",),
        ),
        (bars.draw_texts, (("exporting",), ("measuring",)), ("exporting", "measuring")),
    ],
)
def test_bars_are_shown_where_they_are_asked_for(draw, calls, wanted, monkeypatch, capsys):
    monkeypatch.setattr(bars, "REDRAWN_S", 0)
    told(True, draw, *calls)
    shown = capsys.readouterr()
    assert not shown.out
    assert [text for text in (*wanted, "bias correction 3 of 6") if text not in shown.err] == []
    told(None, draw, *calls)
    assert capsys.readouterr().err == ""
    notebook = SimpleNamespace(get_ipython=type("ZMQInteractiveShell", (), {}))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert bars.in_notebook()
    told(False, draw, *calls)
    assert capsys.readouterr().err == ""


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match="progress='bars' is no function"):
        told("bars", bars.draw_texts)
