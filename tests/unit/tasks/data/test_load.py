import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.standalone.texts import Encoder
from qdqbench.quantize.tasks.data import encode, splits
from qdqbench.quantize.tasks.data import files as data_files
from qdqbench.quantize.tasks.data import load as loading
from qdqbench.quantize.tasks.data.splits import has_only_texts
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.task import EMBED, get_task, score_embeddings
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

from ....support.tables import write_table as write

SST2, STSB = get_task("sst2"), get_task("stsb")
TRICKY = ["NA", "12", "null", 'a, "quoted" one', "naïve ", ""]  # texts, not missing values or numbers


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "##ly"]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def sst2(path, rows=6, **columns):
    write(path, {"sentence": ["good"] * rows, "label": [0, 1] * (rows // 2), "idx": range(rows)} | columns)


def load(folder, task=SST2, split="validation", **options):
    return loading.load_split(task, str(folder), split, **options)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json", ".jsonl"])
def test_formats_give_the_same_texts_and_labels(tmp_path, suffix):
    sst2(tmp_path / f"sst2/validation{suffix}", sentence=TRICKY)
    split = load(tmp_path)
    assert split.dataset[:] == {"sentence": TRICKY, "label": [0, 1] * 3}
    said = "1 of 6 texts in column 'sentence' of split 'validation' are empty"  # one of TRICKY
    assert (split.rows, split.notes, split.warnings) == (6, (), (said,))
    assert split.source == str(tmp_path / f"sst2/validation{suffix}")
    assert len(split.fingerprint) == 64


def test_shards_are_joined_in_order(tmp_path):
    for number, texts in ((1, ["c", "d"]), (0, ["a", "b"])):
        sst2(tmp_path / f"train-0000{number}-of-00002.parquet", 2, sentence=texts)
    assert load(tmp_path, split="train").dataset[:]["sentence"] == ["a", "b", "c", "d"]


def test_fingerprint_follows_the_content_in_folders_of_any_name(tmp_path):
    sst2(tmp_path / "a[b]*/validation.csv")
    sst2(tmp_path / "b/validation.csv")
    sst2(tmp_path / "c/validation.csv", label=[1, 0, 1, 0, 1, 0])
    prints = [load(tmp_path / name).fingerprint for name in ("a[b]*", "b", "c")]
    assert prints[0] == prints[1] != prints[2]


def test_limit_takes_the_first_rows_or_a_seeded_draw(tmp_path):
    sst2(tmp_path / "validation.csv", 100, sentence=[str(row) for row in range(100)])
    first = load(tmp_path, limit=3)
    assert first.dataset[:]["sentence"] == ["0", "1", "2"]
    assert first.notes == ("the first 3 of 100 rows of split 'validation'",)
    drawn, longer, other = (
        load(tmp_path, limit=limit, seed=seed).dataset[:]["sentence"]
        for limit, seed in [(10, 5), (50, 5), (10, 6)]
    )
    assert drawn == longer[:10] != other
    assert len(set(longer)) == 50
    assert sorted(load(tmp_path, seed=5).dataset[:]["sentence"], key=int) == [str(row) for row in range(100)]
    assert "are used, of 500 at most" in load(tmp_path, limit=500, seed=0).notes[0]
    with pytest.raises(UserError, match="at least 1"):
        load(tmp_path, limit=0)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_file_of_very_many_columns_is_refused_before_it_is_read(suffix, tmp_path):
    sst2(tmp_path / f"validation.{suffix}", **{f"k{number}": [1] * 6 for number in range(5_000)})
    with pytest.raises(UserError, match=rf"validation\.{suffix} has 5,003 columns, and 2,000 are the most"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("validation.csv", "sentence,label\nhello, world,1\nhi, there,0\n", "more fields than its header"),
        ("validation.csv", "sentence,label\nhi,0\nhello, world,1\n", "Expected 2 fields in line 3"),
        ("validation.csv", "sentence,label\n", "has no rows"),
        ("validation.csv", "", "No columns.*another form than its name says"),
        ("validation.csv", '{"text": ["a"], "label": [1]}', "another form than its name says"),
        ("validation.csv", "sentence,label,label\na,0,1\nb,1,0\n", "more than one column 'label'"),
        ("validation.json", "[{", "as json"),
        ("validation.jsonl", "", "has no rows"),
        ("validation.parquet", "PAR1 cut off", "as parquet"),
    ],
)
def test_damaged_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_exist(tmp_path):
    with pytest.raises(UserError, match=r"data folder .*nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data file .*mine\.csv does not exist"):
        load(tmp_path / "mine.csv")


@pytest.fixture
def hub(monkeypatch):
    """Every set is at one commit, but for those with a revision."""
    monkeypatch.setattr(splits, "commit_of", lambda name, kind, revision: revision or "newest")


def test_hub_sets_are_asked_for_by_name_config_and_commit(monkeypatch, hub):
    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append((name, config, split, revision))
        return datasets.Dataset.from_dict({"sentence": ["good"], "label": [1], "idx": [0]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    split = load("hub")
    load("hub:owner/set", split="train")
    load("hub:owner/set:config@v1", split="train")
    assert asked == [
        ("nyu-mll/glue", "sst2", "validation", "newest"),
        ("owner/set", None, "train", "newest"),
        ("owner/set", "config", "train", "v1"),
    ]
    assert split.fingerprint.endswith(" newest")
    assert split.source == "hub nyu-mll/glue (sst2), split validation"
    with pytest.raises(UserError, match="'reviews' is not in nyu-mll/glue"):
        load("hub", get_task("reviews", text_columns=["sentence"], num_labels=2))
    with pytest.raises(UserError, match="names no hub set"):
        load("hub:set")


def test_hub_failures_are_one_sentence(monkeypatch, hub):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    wanted = r"cannot load split 'validation' of nyu-mll/glue \(sst2\).*--data FOLDER"
    with pytest.raises(UserError, match=wanted):
        load("hub")
    empty = datasets.Dataset.from_dict({"sentence": [], "label": []})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: empty)
    with pytest.raises(UserError, match="has no rows"):
        load("hub")


def test_loading_prints_nothing_and_leaves_nothing_behind(tmp_path):
    sst2(tmp_path / "data/sst2/validation.parquet")
    (tmp_path / "tmp").mkdir()
    code = (
        "from qdqbench.quantize.tasks.data import load\nfrom qdqbench.quantize.tasks.task import get_task\n"
        f"print(load.load_split(get_task('sst2'), {str(tmp_path / 'data')!r}, 'validation').rows)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("6\n", "")
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["validation.parquet"]


def test_encode_truncates_counts_and_keeps_the_order(tmp_path, tokenizer):
    texts = ["good " * 20, "goodly", "", "bad", "good bad good", "good bad good bad"]
    sst2(tmp_path / "validation.csv", sentence=texts)
    encoded = encode.encode(load(tmp_path), SST2, tokenizer, 5)
    assert encoded.lengths.tolist() == [5, 4, 2, 3, 5, 5]
    assert encoded.truncated == 2
    assert encoded.input_ids[1].tolist() == [2, 5, 7, 3]
    assert encoded.input_ids[1].dtype == encoded.labels.dtype == np.int64
    assert encoded.labels.tolist() == [0, 1] * 3


def test_encode_pairs_with_scores(tmp_path, tokenizer):
    columns = {"sentence1": ["good", "good " * 9], "sentence2": ["bad bad", "bad"], "label": [1, 2.5]}
    write(tmp_path / "validation.parquet", columns)
    encoded = encode.encode(load(tmp_path, STSB), STSB, tokenizer, 8)
    assert encoded.token_type_ids[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert encoded.input_ids[1].tolist() == [2, 5, 5, 5, 5, 3, 6, 3]  # the longer text is cut
    assert encoded.labels.dtype == np.float32
    assert encoded.truncated == 1


WORDS = st.lists(st.sampled_from(["good", "badly", "?", "goodlyly"]), max_size=60).map(" ".join)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.integers(5, 9))
def test_long_texts_of_pairs_are_cut_where_truncation_drops_the_rest(tokenizer, pairs, length):
    first, second = map(list, zip(*pairs, strict=True))
    plain = tokenizer(first, second, truncation=True, max_length=length)["input_ids"]
    rows = Encoder(tokenizer.backend_tokenizer, length).encode(pairs)
    assert [(number, coded.ids) for number, coded in rows] == [*enumerate(plain)]


def test_a_pair_of_long_texts_takes_little_memory(tmp_path, tokenizer):
    columns = {"sentence1": ["good " * 20_000], "sentence2": ["bad " * 10_000], "label": [1.0]}
    write(tmp_path / "validation.parquet", columns)
    (row,) = encode.iter_encoded(load(tmp_path, STSB), STSB, tokenizer, 128)
    assert (len(row.input_ids), row.truncated) == (128, True)
    assert len(row.coded.overflowing) < 50  # of 50,000 without a cut


def test_encoding_in_chunks_changes_nothing(tmp_path, tokenizer, monkeypatch):
    sst2(tmp_path / "validation.csv", sentence=["good " * count for count in range(1, 7)])
    split = load(tmp_path)
    whole = encode.encode(split, SST2, tokenizer, 5)
    monkeypatch.setattr(encode, "TOKENIZER_ROWS", 4)
    samples = list(encode.iter_encoded(split, SST2, tokenizer, 5))
    assert [sample.row for sample in samples] == list(range(6))
    assert [sample.input_ids.tolist() for sample in samples] == [ids.tolist() for ids in whole.input_ids]


def test_a_file_that_unpacks_to_a_hundred_times_its_size_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "validation.parquet", {"sentence": ["good " * 200] * 5000, "label": [0] * 5000})
    assert len(load(tmp_path).dataset) == 5000
    monkeypatch.setattr(data_files, "LEAST_REFUSED", 1 << 20)
    with pytest.raises(UserError, match=r"validation\.parquet would take more than \d MiB when unpacked"):
        load(tmp_path)
    monkeypatch.setattr(data_files, "MOST_GROWTH", 1 << 20)
    monkeypatch.setattr(data_files.files, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(UserError, match="no space left on device"):
        load(tmp_path)


def test_prompts_begin_the_texts_of_their_column(tmp_path, tokenizer):
    write(tmp_path / "validation.parquet", {"sentence1": ["good"], "sentence2": ["bad"], "label": [1.0]})
    task = score_embeddings(STSB, ()).model_copy(update={"prompts": ("bad ", "")})
    rows = [*encode.iter_encoded(load(tmp_path, STSB), task, tokenizer, 128)]
    assert [tokenizer.decode(row.input_ids[1:-1]) for row in rows] == ["bad good", "bad"]


def test_max_length_without_room_and_slow_tokenizer(tmp_path, tokenizer):
    sst2(tmp_path / "validation.csv")
    split = load(tmp_path)
    with pytest.raises(UserError, match="max_length 2 holds the 2 special tokens only"):
        next(encode.iter_encoded(split, SST2, tokenizer, 2))
    slow = type("Slow", (), {"is_fast": False})()
    with pytest.raises(UserError, match="Slow is not a fast tokenizer"):
        next(encode.iter_encoded(split, SST2, slow, 128))


def encoded_of(lengths):
    ids = [np.full(length, row + 10, dtype=np.int64) for row, length in enumerate(lengths)]
    return Encoded(ids, [np.ones_like(row) for row in ids], np.zeros(len(ids), dtype=np.int64), 0)


def check_batches(batches, lengths, batch_size):
    """Every sample once, in its own row, with padding only where the mask is 0."""
    seen = []
    for rows, batch in batches:
        assert len(rows) <= batch_size
        assert batch["input_ids"].shape[1] == max(lengths[row] for row in rows)
        assert {value.dtype for value in batch.values()} == {np.dtype(np.int64)}
        for row, ids, mask, types in zip(rows, *batch.values(), strict=True):
            assert mask.tolist() == [1] * lengths[row] + [0] * (len(mask) - lengths[row])
            assert (ids == np.where(mask, row + 10, 9)).all()
            assert (types == mask).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@settings(deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 9))
def test_sorted_batches(lengths, batch_size):
    batches = list(encode.sorted_batches(encoded_of(lengths), batch_size, pad_id=9))
    check_batches(batches, lengths, batch_size)
    assert [len(rows) for rows, _ in batches[:-1]] == [batch_size] * (len(batches) - 1)
    widths = [batch["input_ids"].shape[1] for _, batch in batches]
    assert widths == sorted(widths, reverse=True)


@given(LENGTHS.map(np.array), st.integers(1, 4), st.sets(st.integers(1, 11), max_size=4))
def test_no_batch_has_rows_of_two_buckets(lengths, size, inner):
    edges = [*sorted(inner), 12]
    batches = encode.sorted_rows(lengths, size, edges)
    assert sorted(np.concatenate([rows for _, rows in batches])) == list(range(len(lengths)))
    for length, rows in batches:
        assert {min(edge for edge in edges if edge >= own) for own in lengths[rows]} == {length}
    for edge in edges:
        counts = [len(rows) for length, rows in batches if length == edge]
        assert not counts or (max(counts) <= size and max(counts) - min(counts) <= 1)
    made = encode.sorted_batches(encoded_of(lengths), size, pad_id=9, edges=edges)
    shapes = {
        (length, len(batch["input_ids"])) for (length, _), (_, batch) in zip(batches, made, strict=True)
    }
    assert len(shapes) == len({length for length, _ in shapes})  # an engine compiles kernels for each shape


@settings(deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 9))
def test_equal_length_batches_have_no_padding_and_hold_few_samples(lengths, batch_size):
    encoded = encoded_of(lengths)
    taken, given_back = 0, 0

    def samples():
        nonlocal taken
        for row, (ids, types) in enumerate(zip(encoded.input_ids, encoded.token_type_ids, strict=True)):
            # Held at this moment: less than a batch of each length.
            assert taken - given_back <= (batch_size - 1) * len(set(lengths[:row]))
            taken += 1
            yield encode.Sample(row, ids, types, False)

    batches = []
    for rows, batch in encode.equal_length_batches(samples(), batch_size, pad_id=9):
        given_back += len(rows)
        assert batch["attention_mask"].all()
        batches.append((rows, batch))
    check_batches(batches, lengths, batch_size)


def test_calibration_batches_are_made_on_each_pass_as_they_are_asked_for(tmp_path, tokenizer, monkeypatch):
    sst2(tmp_path / "train.csv", 40, sentence=["good " * (1 + row % 4) for row in range(40)])
    split = load(tmp_path, split="train", seed=1)
    samples, asked = encode.iter_encoded, []

    def watched(*args):
        for sample in samples(*args):
            asked.append(sample.row)
            yield sample

    monkeypatch.setattr(encode, "iter_encoded", watched)
    batches = encode.CalibrationBatches(split, SST2, tokenizer, 5, 3, 0)
    assert asked == []
    next(iter(batches))
    assert len(asked) < 10
    expected = encode.equal_length_batches(samples(split, SST2, tokenizer, 5), 3, pad_id=0)
    expected = [batch for _, batch in expected]
    assert sum(len(batch["input_ids"]) for batch in expected) == 40
    for _ in range(2):
        np.testing.assert_equal([*batches], expected)


class TestTexts:
    """`--task embed`: texts without labels."""

    def lines(self, path, count=40):
        path.write_text("".join(f"text {number}\n" for number in range(count)))
        return path

    @pytest.mark.parametrize("suffix", [".txt", ".csv", ".parquet", ".jsonl"])
    def test_a_single_file_calibrates_with_half_and_judges_on_the_other(self, tmp_path, suffix):
        texts = [f"text {number}" for number in range(40)]
        path = tmp_path / f"mine{suffix}"
        if suffix == ".txt":
            self.lines(path)
        else:
            write(path, {"text": texts})
        halves = [list(load(path, EMBED, split).dataset["text"]) for split in ("train", "validation")]
        assert sorted(halves[0] + halves[1]) == sorted(texts)
        assert len(halves[0]) == len(halves[1])
        drawn = load(path, EMBED, "train", limit=5, seed=0)
        assert (len(drawn.dataset), drawn.rows) == (5, 20)

    def test_a_folder_has_its_own_splits(self, tmp_path):
        self.lines(tmp_path / "train.txt", 3)
        (tmp_path / "validation.txt").write_text("a\n\na\nb\n")
        found = load(tmp_path, EMBED)
        assert list(found.dataset["text"]) == ["a", "b"]
        assert len(found.warnings) == 2
        assert len(load(tmp_path, EMBED, "train").dataset) == 3

    def test_a_text_file_calibrates_a_task_with_labels(self, tmp_path):
        self.lines(tmp_path / "plain.txt", 3)
        assert has_only_texts(SST2, str(tmp_path), "plain")
        found = load(tmp_path, SST2, "plain", labelled=False)
        assert list(found.dataset["sentence"]) == ["text 0", "text 1", "text 2"]
        with pytest.raises(UserError, match="has no column label"):
            load(tmp_path, SST2, "plain")

    def test_what_cannot_be_read(self, tmp_path):
        with pytest.raises(UserError, match=r"--data .*a\.md is none of \.parquet, .*\.txt"):
            load(self.lines(tmp_path / "a.md"), EMBED)
        write(tmp_path / "b.csv", {"other": ["a", "b"]})
        with pytest.raises(UserError, match="has no column text; its columns are other"):
            load(tmp_path / "b.csv", EMBED)
        (tmp_path / "c.txt").write_text("\n\n")
        with pytest.raises(UserError, match="has no rows"):
            load(tmp_path / "c.txt", EMBED)

    def test_the_texts_of_a_pair_are_rows_of_their_own(self, tmp_path, tokenizer):
        columns = {"sentence1": ["a b", "c"], "sentence2": ["d", "e f g"], "label": [1, 2]}
        write(tmp_path / "validation.csv", columns)
        task = score_embeddings(get_task("stsb"), ())
        encoded = encode.encode(load(tmp_path, task), task, tokenizer, 16)
        assert encoded.lengths.tolist() == [4, 3, 3, 5]
        assert encoded.samples.tolist() == [0, 0, 1, 1]
        assert encoded.gold.tolist() == [1, 2]
        assert [types.max() for types in encoded.token_type_ids] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "deep"),
    [
        ("[" * 100_000 + "]" * 100_000, True),
        ('{"a":' * 101 + "1" + "}" * 101, True),
        ("[\n" * 200 + "]\n" * 200, True),
        ("[" * 90 + "]" * 90, False),
        ("[" + "[1], " * 500 + "[1]]", False),
        ('"' + "[" * 1000 + '\\"' + "{" * 1000 + '"', False),
    ],
)
def test_json_of_very_many_brackets_is_refused(row, deep, tmp_path):
    path = tmp_path / "validation.jsonl"
    path.write_text(f'{{"sentence": "a [", "label": 0, "x": {row}}}\n' * 3)
    assert data_files._is_deep(path) == deep
    if deep:
        with pytest.raises(UserError, match="has over 100 brackets inside each other"):
            load(tmp_path, split="validation")


def test_labels_of_one_class_are_doubted(tmp_path):
    for rows, doubts in (("a,1\nb,1\n", 1), ("a,1\nb,0\n", 0)):
        (tmp_path / "validation.csv").write_text(f"sentence,label\n{rows}")
        warnings = load(tmp_path, split="validation").warnings
        assert sum("of one class: its score cannot tell" in line for line in warnings) == doubts


def test_copies_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("qdqbench-data-old", "qdqbench-data-held", "other"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "qdqbench-data-new").mkdir()
    (tmp_path / "qdqbench-data-link").symlink_to(tmp_path / "other")
    with files.locked(tmp_path / "qdqbench-data-held"):
        own = Path(data_files.cache_folder.__wrapped__())
    assert {path.name for path in tmp_path.iterdir()} == {
        *("qdqbench-data-held", "qdqbench-data-new", "qdqbench-data-link", "other", own.name)
    }
    with pytest.raises(OSError, match="temporarily unavailable"), files.locked(own):
        pass


def test_classes_in_another_order_than_the_model_s_are_refused(tmp_path):
    classes = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"sentence": datasets.Value("string"), "label": classes})
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1]}, features=features)
    rows.to_parquet(tmp_path / "train.parquet")
    split = load(tmp_path, split="train")
    for names in (["BAD", "GOOD"], ["LABEL_0", "LABEL_1"], ["bad", "fine"]):
        loading.require_order(split, SST2, names)
    with pytest.raises(UserError, match=r"are bad, good from 0 on, those of the model good, bad; number"):
        loading.require_order(split, SST2, ["Good", "Bad"])


@pytest.mark.parametrize(
    "said", ["[Errno 28] No space left on device", "Not enough disk space. Needed: 1 MB"]
)
def test_a_full_disk_of_temporary_files_is_no_damage_of_the_data(tmp_path, monkeypatch, said):
    (tmp_path / "validation.csv").write_text("sentence,label\na,1\n")

    def full(*_, **__):
        raise RuntimeError("an error while the set was made") from OSError(said)

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(UserError, match=r"qdqbench-data.*: no space left on device"):
        loading.load_split(get_task("sst2"), str(tmp_path), "validation")
