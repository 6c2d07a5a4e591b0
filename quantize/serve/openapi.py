"""The OpenAPI description of a server, from its schemas."""

from importlib import metadata
from typing import Any

from pydantic.json_schema import models_json_schema

from qdqbench.quantize.serve.served import Limits, Served

_JSON = "application/json"
_REFUSALS = {
    "400": "The body is not JSON.",
    "408": "The body did not come in time.",
    "413": "Too many or too long texts, or too large a body.",
    "415": "The body is of another type than JSON.",
    "422": "JSON of another form.",
    "503": "The queue is full, or the server stops; Retry-After says when to come again.",
}
_PLAIN = {
    "/v1/model": "What is served.",
    "/health/live": "Whether the process answers.",
    "/health/ready": "Whether a worker answers; 503 where none does, and while the server stops.",
    "/metrics": "Metrics for Prometheus.",
}


def description(served: Served, limits: Limits) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    endpoint = served.endpoint
    _, made = models_json_schema(
        [(endpoint.request, "validation"), (endpoint.answer, "serialization")],
        ref_template="#/components/schemas/{model}",
    )
    schemas = made["$defs"]
    schemas["Error"] = _object({"error": {"type": "string", "description": "One sentence."}})
    schemas["Answers"] = _object(
        {
            "model": {"type": "string", "enum": ["engine", "fp32"]},
            "answers": {"type": "array", "items": _ref(endpoint.answer.__name__)},
        }
    )
    asked = {
        "summary": f"{served.task.kind.name}: {(endpoint.request.__doc__ or '').rstrip('.').lower()}",
        "description": (
            f"At most {limits.texts} texts of {limits.characters} characters, {limits.body_bytes} bytes and "
            f"{limits.timeout_s:g} s; a row holds {served.max_length} tokens."
        ),
        "requestBody": {"required": True, "content": {_JSON: {"schema": _ref(endpoint.request.__name__)}}},
        "responses": {
            "200": {"description": "Answers.", "content": {_JSON: {"schema": _ref("Answers")}}},
            **{
                status: {"description": why, "content": {_JSON: {"schema": _ref("Error")}}}
                for status, why in _REFUSALS.items()
            },
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"qdqbench serve {served.name}", "version": metadata.version("qdqbench")},
        "paths": {
            f"/v1/{endpoint.name}": {"post": asked},
            **{
                path: {"get": {"summary": told, "responses": {"200": {"description": told}}}}
                for path, told in _PLAIN.items()
            },
        },
        "components": {"schemas": schemas},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}
