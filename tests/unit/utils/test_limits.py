"""The table of limits: "auto" may become any backend, so it promises what all can do."""

from qdqbench.quantize.utils import limits
from qdqbench.quantize.utils.limits import LIMITS, Limits, limits_of


def test_auto_is_what_all_backends_can_do(monkeypatch):
    assert limits_of("tensorrt_rtx") is LIMITS["tensorrt_rtx"]
    monkeypatch.setattr(limits, "LIMITS", {"a": Limits((64, 32), 512), "b": Limits((16, 32, 64), 384)})
    assert limits_of("auto") == Limits((32, 64), 384)
    assert limits_of("a") == Limits((64, 32), 512)


def test_head_sizes_in_words():
    assert limits_of().head_sizes_text == "16, 32 or 64"
