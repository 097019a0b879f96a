"""The models of a gateway as OpenAI's API lists them."""

from __future__ import annotations

from gateway.http.answer_schema import Model, ModelList
from protos.outrider.v1 import inference_pb2 as pb

OWNER = "outrider"


def model_list(models: pb.ListModelsResponse, created: int) -> ModelList:
    """All of them; `created` is when the gateway began to serve them, in seconds since 1970."""
    return {"object": "list", "data": [model_entry(model, created) for model in models.models]}


def model_entry(model: pb.Model, created: int) -> Model:
    """One of them."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": model.max_model_len,
        "ready": model.ready,
    }
