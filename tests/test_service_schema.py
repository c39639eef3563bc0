"""Valid and invalid requests generated from the server's own OpenAPI description never make the server fail."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DataObject, data
from service_server import Server

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Requests of each path, valid and invalid ones each.
EXAMPLES = 20
# The number for paths that translate to a chat, which has its own EXAMPLES; their bodies take long to generate.
TRANSLATED = {"/v1/messages": 8, "/v1/responses": 8}
# Paths with the same body as another path.
SAME_BODY = {"/v1/messages/count_tokens", "/apply-template"}

# Seconds after which an answer counts as missing.
PATIENCE_S = 60
# Tokens of an answer; long ones would show no more.
FEW = 4
LIMITS = {"n": 2, **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), FEW)}


# One xdist worker runs these tests, since it starts one server.
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("service_schema")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("schema"), "--max-new-tokens", str(FEW), "--distill", "off")
    try:
        yield one.wait_until_ready()
    finally:
        one.stop()


def cheap(body: Any) -> Any:
    """The same request with short answers."""
    if not isinstance(body, dict):
        return body
    # In llama-server's API -1 means as many tokens as the context holds.
    limited = {
        name: most
        for name, most in LIMITS.items()
        if isinstance(body.get(name), int) and (body[name] > most or (name, body[name]) == ("n_predict", -1))
    }
    return {**body, **limited}


def test_no_request_of_the_description_makes_the_server_fail_or_hang(server: Server) -> None:
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in description.get_all_operations()]
    asked = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion"}
    assert asked | {"/adaptive/adapters/rollback"} <= {o.path for o in operations}
    statuses: Counter[int] = Counter()

    def ask(operation: Any, mode: Any) -> None:
        @settings(
            max_examples=TRANSLATED.get(operation.path, EXAMPLES),
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn=data())
        def one(drawn: DataObject) -> None:
            case = drawn.draw(operation.as_strategy(generation_mode=mode))
            case.body = cheap(case.body)
            response = case.call(timeout=PATIENCE_S)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        one()

    for operation in (one for one in operations if one.path not in SAME_BODY):
        for mode in schemathesis.GenerationMode:
            with contextlib.suppress(Unsatisfiable):  # a path without parameters has no invalid request
                ask(operation, mode)
    assert statuses[200] > 0
    assert statuses[400] > 0
    print(f"{statuses.total()} requests: {dict(statuses)}")


def test_the_server_answers_as_ever_after_all_that(server: Server) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": FEW})
        assert answer.json()["usage"]["completion_tokens"] == FEW
        deadline = time.monotonic() + PATIENCE_S
        while any(slot["is_processing"] for slot in http.get("/slots").json()):
            assert time.monotonic() < deadline, "the engine goes on answering nobody"
            time.sleep(0.02)
    assert "Traceback" not in server.said
