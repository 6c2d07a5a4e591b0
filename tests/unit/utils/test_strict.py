import pytest

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict, read


class Leaf(Strict):
    size: int


class Tree(Strict):
    leaves: list[Leaf]


def test_a_file_of_the_schema(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text('{"leaves": [{"size": 3}]}')
    assert read(path, Tree, "tree", "grow it again") == Tree(leaves=[Leaf(size=3)])


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('{"leaves": [{"size": 3}, {"size": "big"}]}', r"leaves\.1\.size: .* integer"),
        ('{"leaves": [], "root": 1}', "root: Extra inputs"),
        ("{}", "leaves: Field required"),
        ("[]", "the whole: Input should be"),
    ],
)
def test_another_file_names_the_field_and_the_fix(tmp_path, content, field):
    path = tmp_path / "tree.json"
    path.write_text(content)
    said = rf"tree\.json is no tree of this version of qdqbench \({field}.*\); grow it again$"
    with pytest.raises(UserError, match=said) as error:
        read(path, Tree, "tree", "grow it again")
    assert "\n" not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "tree.json", Tree, "tree", "grow it again")
