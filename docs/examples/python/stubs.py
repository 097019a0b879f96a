"""The same without outrider.client: the generated messages and a plain channel of grpc.

    python stubs.py "What is speculative decoding?"

Only the folder protos/ is needed, and the packages grpcio and protobuf. OUTRIDER_ADDRESS and
OUTRIDER_API_KEY as in ask.py.
"""

import os
import sys

import grpc

from protos.outrider.v1 import inference_pb2, inference_pb2_grpc


def main(question: str) -> int:
    key = os.environ.get("OUTRIDER_API_KEY")
    metadata = [("authorization", f"Bearer {key}")] if key else []
    request = inference_pb2.GenerateRequest(
        chat={"messages": [{"role": "user", "content": question}]},
        sampling={"temperature": 0},
        stopping={"max_tokens": 64},
    )
    with grpc.insecure_channel(os.environ.get("OUTRIDER_ADDRESS", "127.0.0.1:50051")) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            for message in stub.Generate(request, metadata=metadata, timeout=60):
                if message.HasField("chunk"):
                    print(message.chunk.text, end="", flush=True)
                else:
                    stats = message.finish.speculation
                    print(
                        f"\n[seed {message.finish.seed}; "
                        f"{stats.accepted} of {stats.drafted} drafts stood]"
                    )
        except grpc.RpcError as error:
            print(f"\n{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "What is a draft model?"))
