import pytest

from qdqbench.quantize.engine.hazards import HAZARDS, find_hazards, is_older


@pytest.mark.parametrize(
    ("backend", "version", "capability", "said"),
    [
        ("tensorrt", "10.0.0.6", "8.9", "_gemm_mha_v2"),
        ("tensorrt", "10.0.1", "8.9", "_gemm_mha_v2"),
        ("tensorrt", "10.0.1.6", "8.9", None),
        ("tensorrt", "9.3.0", "8.9", None),
        ("tensorrt", "10.16.0.72", "9.0", None),
        ("tensorrt", "11.4.0.106", "9.0", None),
        ("tensorrt_rtx", "10.0.0.6", "8.9", None),
        ("tensorrt_rtx", "1.4.0.76", "9.0", "not officially supported"),
        ("tensorrt_rtx", "1.6.1.120", "9.0", "not officially supported"),
        ("tensorrt_rtx", "1.7.1.116", "9.0", "refuses it"),
        ("tensorrt_rtx", "1.10.0", "9.0", "refuses it"),
        ("tensorrt_rtx", "1.6.1.120", "8.9", None),
        ("tensorrt_rtx", "1.6.1.120", None, None),
    ],
)
def test_warnings_by_version_and_gpu(backend, version, capability, said):
    found = find_hazards(backend, version, capability)
    assert len(found) == (said is not None)
    assert said is None or (said in found[0] and found[0].startswith(f"{backend} {version}: "))


def test_every_hazard_can_be_met():
    versions = ("10.0.0.6", "1.4", "1.7")
    met = [h for h in HAZARDS if any(find_hazards(h.backend, v, h.compute_capability) for v in versions)]
    assert met == list(HAZARDS)


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        ("570.10", "580.2", True),
        ("580.9", "580.10", True),
        ("580.10", "580.10", False),
        ("10.0", "10.0.0", False),
        ("10.0.0", "10.0.1", True),
        ("580.65.06", "580.65", False),
        ("unknown", "1", True),
    ],
)
def test_order_of_versions(one, other, older):
    assert is_older(one, other) is older
