"""Two runs side by side; every number is invented."""

from qdqbench.eval.runs.comparison import (
    ComparedLayer,
    ComparedPair,
    ComparedRun,
    ComparedSample,
    RunComparison,
    SamplePrediction,
)

from .records import comparison, sample_of, speedup


def sample_comparison():
    """Two runs of one model on the same samples, three of them answered otherwise."""
    names = ("int8-linears", "int8-attention")
    runs = [
        ComparedRun(
            name=name,
            folder=f"runs/{name}",
            recipe=f"bert-{name}",
            metrics={"accuracy": 0.8956 - 0.004 * place},
            vs_fp32=comparison({"accuracy": -0.0012 - 0.004 * place}, 0.0021),
            gate="failed" if place else "passed",
            speed=[speedup(0.97 + place / 2, 0.96 + place / 2, 0.98 + place / 2, ms=1.5 - place / 2)],
            **sample_of("compared run"),
        )
        for place, name in enumerate(names)
    ]
    answers = {name: SamplePrediction(prediction="positive", margin=0.03, right=True) for name in names}
    answers[names[1]] = SamplePrediction(prediction="negative", margin=0.21, right=False)
    samples = [
        ComparedSample(
            task="sst2",
            sample=number,
            text=f"{number} times a gorgeous, witty, seductive movie " * 3,
            label="positive",
            predictions=answers,
            distance=0.1 / number,
        )
        for number in (3, 17, 401)
    ]
    layers = [
        ComparedLayer(
            what="amax",
            name=f"bert.encoder.layer.{layer}.{kind}",
            values={names[0]: (7 * layer) % 4 + 0.5, names[1]: None if layer else 2.5},
        )
        for layer in range(4)
        for kind in ("attention.self.query", "intermediate.dense", "output.dense")
    ]
    versus = comparison({"accuracy": -0.004}, 0.002, disagreements=3, mcnemar_p=0.25)
    return RunComparison(
        created="2026-07-01T12:00:00+00:00",
        command="qdqbench compare runs/int8-linears runs/int8-attention",
        runs=runs,
        pairs=[ComparedPair(first=names[0], second=names[1], comparison=versus)],
        samples=samples,
        sample_count=3,
        layers=layers,
        notes=["both have the same calibration data"],
    )
