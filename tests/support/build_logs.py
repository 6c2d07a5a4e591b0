"""Build logs written by hand from the documented formats of trtexec and Polygraphy; no tool printed them."""


def spread(name, median):
    return line(f"{name}: min = 0 ms, max = 9 ms, mean = 1 ms, median = {median} ms, percentile(99%) = 9 ms")


def line(text, severity="I"):
    return f"[01/02/2026-03:04:05] [{severity}] {text}"


def missing_scale(*names):
    said = "expect fall back to non-int8 implementation for any layer consuming or producing given tensor"
    return [line(f"[TRT] Missing scale and zero-point for tensor {name}, {said}", "W") for name in names]


def trtexec(
    *middle,
    options="--onnx=model.onnx --int8 --fp16",
    version="8601",
    opt="8x128",
    load="8x128",
    compute=1.0,
    enqueue=0.2,
    verdict="PASSED",
):
    """A log of one build and its timing."""
    lines = [
        f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec {options}",
        line("=== Build Options ==="),
        line("Precision: FP32+FP16+INT8"),
        line(f"Input build shape (profile 0): input_ids=1x1+{opt}+32x512"),
        line(f"Input inference shape : input_ids={load}"),
        line("Selected Device: NVIDIA L4"),
        *middle,
        line("Throughput: 812.5 qps"),
        spread("Enqueue Time", enqueue),
        spread("H2D Latency", 0.012),
        spread("GPU Compute Time", compute),
        f"&&&& {verdict} TensorRT.trtexec [TensorRT v{version}] # trtexec {options}",
    ]
    return "\n".join(lines) + "\n"


POLYGRAPHY = """[I] RUNNING | Command: /usr/local/bin/polygraphy convert model.onnx --int8 -o model.engine
[I] Configuring with profiles:[
        Profile 0:
            {input_ids [min=[1, 1], opt=[8, 128], max=[32, 512]],
             attention_mask [min=[1, 1], opt=[8, 128], max=[32, 512]]}
    ]
[I] Building engine with configuration:
    Flags                  | [INT8]
    Engine Capability      | EngineCapability.STANDARD
[W] TensorRT 10.0.0: Missing scale and zero-point for tensor x, expect fall back to non-int8 implementation
[E] Could not find any implementation for node {ForeignNode[a...b]}.
"""
