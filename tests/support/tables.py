"""Samples as files, as people bring them."""

import pandas


def write_table(path, columns):
    """Write columns of any values in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pandas.DataFrame(columns, dtype=object).infer_objects()
    if path.suffix in (".json", ".jsonl"):
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl")
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
