"""A gRPC server that runs a repository, and the exported client asking it: FOLDER TEXT...

A process of its own: tritonclient lies beside the environment.
"""

import runpy
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import triton_stub

warnings.simplefilter("ignore")
sys.path.append(str(triton_stub.BINDINGS))
import grpc  # noqa: E402
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype  # noqa: E402


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, folder):
        self.repository = triton_stub.Repository(folder)

    def ModelInfer(self, request, context):
        import numpy as np

        inputs = {}
        for told, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            kind = triton_to_np_dtype(told.datatype)
            flat = deserialize_bytes_tensor(raw) if told.datatype == "BYTES" else np.frombuffer(raw, kind)
            inputs[told.name] = flat.reshape([*told.shape])
        made = self.repository.run(request.model_name, inputs)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for wanted in request.outputs:
            array = made[wanted.name]
            kind = {"float32": "FP32", "int64": "INT64"}[str(array.dtype)]
            answer.outputs.add(name=wanted.name, datatype=kind, shape=array.shape)
            answer.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        return answer


def main():
    folder, *texts = sys.argv[1:]
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(Path(folder) / "models"), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.argv = ["client_grpc.py", *texts, "--url", f"127.0.0.1:{port}"]
    runpy.run_path(str(Path(folder) / "client_grpc.py"), run_name="__main__")
    server.stop(None)


if __name__ == "__main__":
    main()
