"""The license is what the head of a model card says, and nothing else."""

import pytest

from qdqbench.quantize.deployment.hub import find_license


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
