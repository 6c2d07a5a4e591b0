"""One finished run, one set of figures: read from each command, and held to results.json."""

import json
import re

from qdqbench.eval.runs.report.verdict import count_linears
from qdqbench.eval.runs.results import read_results


def test_every_command_has_the_figures_of_the_run(finished_run, a_run, tmp_path, qdqbench):
    results = read_results(finished_run)
    engine, last = results.engine, [row for row in results.stages.values() if row.status == "done"][-1]
    done, linears = count_linears(results, engine)
    told, checked = (json.loads(qdqbench(name, finished_run, "--json").out) for name in ("inspect", "check"))
    assert told["int8_gemms"] == engine.int8_gemms
    assert told["expected_int8_gemms"] == engine.expected_int8_gemms
    assert (told["profiles"], sum(told["kernel_counts"].values())) == (engine.profiles, engine.kernels)
    assert (checked["counts"]["int8_linears"], checked["counts"]["linears"]) == (done, linears)
    assert checked["findings"] == [row.model_dump(mode="json") for row in results.findings]
    compared = qdqbench("compare", finished_run, a_run, "--out", tmp_path / "compared", "--json")
    for run in json.loads(compared.out)["runs"]:
        assert (run["metrics"], run["stderr"]) == (last.metrics, last.stderr)
        assert (run["int8"], run["linears"], run["engine_bytes"]) == (done, linears, engine.bytes)
    shown = " ".join(qdqbench("inspect", finished_run).out.split())
    assert f"INT8 linears {done} of {linears}" in shown
    assert f"kernels {engine.kernels}: " in shown
    assert f"{done} of {linears} linears in INT8" in qdqbench("check", finished_run).out
    for name in ("report.html", "report.md"):
        text = (finished_run / name).read_text(encoding="utf-8")
        assert f"{done} of {linears}" in text
        for kind, count in [("kernels", engine.kernels), *((k, n) for k, n in told["kernel_counts"].items())]:
            assert re.search(rf"\b{count} {kind}\b", text), kind
    assert all(row.bytes == (finished_run / row.name).stat().st_size for row in results.files)
