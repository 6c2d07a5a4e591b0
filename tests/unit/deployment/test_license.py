"""The license is what the head of a model card says, and nothing else."""

import json

import pytest

from qdqbench.quantize.deployment.hub import find_base, find_license


@pytest.mark.parametrize(
    ("card", "license_name"),
    [
        ("---\nlicense: mit\nlanguage: en\n---\n# Model\n", "mit"),
        ("---\nlicense: other\nlicense_name: my  own\n---\n", "my own"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# Model\nlicense: mit\n", None),
        ("---\ntags: [a]\nlicense: 'apache-2.0'  # of the weights\n---\n", "apache-2.0"),
        ("---\ndate: 2023-02-30\nx: !!int ''\ny: " + "[" * 9000 + "\nlicense: mit\n---\n", "mit"),
        ("---\na: &a [x]\nlicense: &b [*a, *a]\n---\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense: " + "1" * 5000 + "\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- license\n---\n", None),
        (b"\xff\xfe\x00", None),
        (None, None),
    ],
)
def test_the_head_of_the_card(tmp_path, card, license_name):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert find_license(str(tmp_path), None) == license_name


@pytest.mark.parametrize(
    ("card", "saved_as", "base"),
    [
        ("base_model: owner/name", "", "owner/name"),
        ("base_model:\n- 'owner/name'\n- other/name", "x/y", "owner/name"),
        ("language: en", "intfloat/e5-small", "intfloat/e5-small"),
        ("language: en", "models/all-mpnet-base-v2", None),  # a folder of whoever saved it
        ("base_model: &a [x]", "/root/.cache/model", None),
    ],
)
def test_the_base_of_a_folder(tmp_path, card, saved_as, base):
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": saved_as}))
    assert find_base(str(tmp_path)) == ({"base_model": base} if base else {})
