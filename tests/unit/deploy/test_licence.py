"""The licence is what the head of a model card says, and nothing else."""

import pytest

from qdqbench.quantize.deploy.licence import find_licence


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\nlanguage: en\n---\n# Model\n", "mit"),
        ("---\nlicense: other\nlicense_name: my  own\n---\n", "my own"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# Model\nlicense: mit\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- license\n---\n", None),
        (b"\xff\xfe\x00", None),
        (None, None),
    ],
)
def test_the_head_of_the_card(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert find_licence(str(tmp_path), None) == licence
