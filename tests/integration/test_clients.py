"""Clients of other servers, as they are on PyPI, against a server of ours."""

import base64
import json
from contextlib import ExitStack

import numpy as np
import pytest

from .test_serve import fake_server

TEXTS = ["a good film", "awful", "it is"]


@pytest.fixture(scope="module")
def served():
    """The URL of a server of an endpoint, and what its front answers in its own form."""
    running = {}
    with ExitStack() as stack:

        def start(endpoint):
            if endpoint not in running:
                running[endpoint] = stack.enter_context(fake_server(order={"endpoint": endpoint}))[1]
            return f"http://127.0.0.1:{running[endpoint]}"

        yield start


def ask(url, **fields):
    """Our own form, by the standard library."""
    from urllib.request import Request, urlopen

    request = Request(url, json.dumps(fields).encode(), {"content-type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)


def test_openai(served):
    openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
    url = served("embed")
    known = [each["embedding"] for each in ask(f"{url}/v1/embed", texts=TEXTS)["answers"]]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for form in ("base64", "float", None):
        given = {"encoding_format": form} if form else {}
        made = client.embeddings.create(model="any", input=TEXTS, **given)
        found = [each.embedding for each in made.data]
        found = [np.frombuffer(base64.b64decode(e), "<f4") if isinstance(e, str) else e for e in found]
        np.testing.assert_allclose(found, known, rtol=1e-6)
        assert [each.index for each in made.data] == [0, 1, 2]
    assert made.usage.total_tokens == sum(
        each["tokens"] for each in ask(f"{url}/v1/embed", texts=TEXTS)["answers"]
    )
    assert [model.id for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.UnprocessableEntityError, match="cannot be cut to 8 dimensions") as caught:
        client.embeddings.create(model="any", input=TEXTS, dimensions=8)
    assert caught.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.UnprocessableEntityError, match="Expected"):
        client.embeddings.create(model="any", input=[[1, 2, 3]])


def test_langchain(served):
    kind = pytest.importorskip(
        "langchain_openai", reason="needs langchain-openai: pip install langchain-openai"
    )
    options = {"base_url": f"{served('embed')}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    made = kind.OpenAIEmbeddings(model="any", **options).embed_documents(TEXTS)
    known = [each["embedding"] for each in ask(f"{served('embed')}/v1/embed", texts=TEXTS)["answers"]]
    np.testing.assert_allclose(made, known, rtol=1e-6)


def test_llama_index(served):
    kind = pytest.importorskip(
        "llama_index.embeddings.openai_like",
        reason="needs llama-index: pip install llama-index-embeddings-openai-like",
    )
    made = kind.OpenAILikeEmbedding(model_name="any", api_base=f"{served('embed')}/v1", api_key="none")
    known = [each["embedding"] for each in ask(f"{served('embed')}/v1/embed", texts=TEXTS)["answers"]]
    np.testing.assert_allclose(made.get_text_embedding_batch(TEXTS), known, rtol=1e-6)


def test_huggingface_hub(served):
    from huggingface_hub import InferenceClient

    url = served("embed")
    known = [each["embedding"] for each in ask(f"{url}/v1/embed", texts=TEXTS)["answers"]]
    for base in (url, f"{url}/embed"):
        made = InferenceClient(base).feature_extraction(TEXTS[0], truncate=True)
        np.testing.assert_allclose(made, known[:1], rtol=1e-6)
    (answer,) = ask(f"{served('predict')}/v1/predict", texts=TEXTS[:1])["answers"]
    found = InferenceClient(served("predict")).text_classification(TEXTS[0])
    assert {each.label: each.score for each in found} == pytest.approx(answer["scores"])
    assert found[0].label == answer["label"]


def test_the_forms_of_text_embeddings_inference(served):
    url = served("predict pairs")
    scores = [each["score"] for each in ask(f"{url}/v1/predict", pairs=[["a", "it"], ["is", "a"]])["answers"]]
    assert [each[0]["score"] for each in ask(f"{url}/predict", inputs=[["a", "it"], ["is", "a"]])] == scores
    assert ask(f"{url}/predict", inputs=["a", "it"]) == [{"label": "LABEL_0", "score": scores[0]}]
    url = served("rank")
    known = ask(f"{url}/v1/rank", query="good", passages=TEXTS)["answers"]
    made = ask(f"{url}/rerank", query="good", texts=TEXTS, raw_scores=True, return_text=True)
    assert [(each["index"], each["score"]) for each in made] == [(e["index"], e["score"]) for e in known]
    assert [each["text"] for each in made] == [TEXTS[each["index"]] for each in known]
    shares = [each["score"] for each in ask(f"{url}/rerank", query="good", texts=TEXTS)]
    assert shares == pytest.approx([1 / (1 + np.exp(-each["score"])) for each in known])
