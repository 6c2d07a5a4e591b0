"""The chart of an embedding model: how near the embeddings of each stage are to those of FP32."""

import numpy as np

from qdqbench.eval.report.svg import BLUE, GREEN, ORANGE, PURPLE, dress, figure_of, legend, log_scale, svg_of
from qdqbench.quantize.core.comparison import COSINE_EDGES, Agreement
from qdqbench.quantize.core.results import Results

STYLES = {
    "ptq": (PURPLE, "D"),
    "fake_quant": (BLUE, "o"),
    "onnxruntime": (ORANGE, "s"),
    "engine": (GREEN, "^"),
}


def agreements(results: Results) -> dict[str, Agreement]:
    """What is known of each stage of an embedding model; empty of other models."""
    compared = {name: row.vs_fp32 for name, row in results.stages.items()}
    return {name: row.agreement for name, row in compared.items() if row is not None and row.agreement}


def agreement_svg(results: Results, labels: dict[str, str]) -> str:
    """Texts by distance from FP32's embedding, and by how many of its neighbours stay; may be empty."""
    if not (found := agreements(results)):
        return ""
    figure = figure_of(4.6)
    near, kept = figure.subplots(2, 1)
    edges = np.array([COSINE_EDGES[0] / 2, *COSINE_EDGES, 2])
    centres = np.sqrt(edges[1:] * edges[:-1])
    for name, row in found.items():
        colour, marker = STYLES[name]
        look = {"color": colour, "marker": marker, "markersize": 4, "label": labels.get(name, name)}
        shares = 100 * np.array(row.cosine_counts) / row.n
        seen = np.flatnonzero(shares)
        shown = slice(max(seen[0] - 1, 0), seen[-1] + 2)
        near.plot(centres[shown], shares[shown], **look)
        kept.plot(range(len(row.neighbor_counts)), 100 * np.array(row.neighbor_counts) / row.n, **look)
    log_scale(near, "x")
    near.set_xlabel("1 - cosine to the embedding of FP32")
    kept.set_xlabel("of the nearest texts by FP32, how many are still among the nearest")
    kept.xaxis.get_major_locator().set_params(integer=True)
    dress(near, "texts by distance from FP32, %", grid="both")
    dress(kept, "texts by neighbours that stay, %", grid="both")
    legend(figure, 3)
    return svg_of(figure, "agreement", "How near the embeddings of each stage are to those of FP32")
