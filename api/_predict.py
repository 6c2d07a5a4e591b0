"""Answers to files of any number of texts."""

from qdqbench._progress import displayed
from qdqbench._runs import Progress
from qdqbench.quantize.deployment.options import PredictOptions
from qdqbench.quantize.deployment.predict import Predicted, predict_files
from qdqbench.quantize.utils.options import take_options


@take_options
def predict(options: PredictOptions, *, progress: Progress = None) -> Predicted:
    """Answer the rows of files with a run's engine, and write them in order; a killed call resumes.

    With several processes, a script calls it under `if __name__ == "__main__"`.

    Args:
        progress: True for a bar (default in notebooks), or a function that is called with what is being done.

    Raises:
        UserError: input that cannot be used; parts that are finished stay.
        MissingDevice: no engine, or no device for it.
    """
    with displayed(progress):
        return predict_files(options)
