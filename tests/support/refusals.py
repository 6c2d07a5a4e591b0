"""A file of JSON with other values, and the sentence by which a call is refused."""

import json

import pytest

from qdqbench.quantize.utils.errors import UserError


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(call, folder, **options):
    """One line that names the folder."""
    with pytest.raises(UserError) as error:
        call(str(folder), **options)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    assert "Traceback" not in message
    return message
