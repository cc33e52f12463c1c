"""The HTTP application: routes, and what surrounds each request.

Knows HTTP; does not know what the fields of a body mean (gateway.translation) and how answers look (gateway.answers).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gateway import callers, sse, translation
from gateway.answers import Answer
from gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.errors import HIDDEN, HttpError, Json, http_error, unavailable, unknown_model
from gateway.metrics import Metrics
from gateway.models import ServedModels
from gateway.openapi import PATHS, document
from gateway.parsing import Body
from gateway.prompts import responses
from gateway.reading import Bodies
from gateway.responses_answer import ResponsesAnswer
from gateway.responses_body import ResponsesBody
from gateway.settings import GatewaySettings
from gateway.tools import Formats, Parser
from gateway.waiting import Waiting, shutting_down
from specdec.client import Client
from specdec.core.errors import PermissionDenied, SpecdecError, Unauthenticated
from specdec.telemetry.prometheus import CONTENT_TYPE, Scrape
from specdec.v1 import generation_pb2

log = logging.getLogger(__name__)

_SCRAPE_S = 2.0  # Prometheus waits for 10 s, and there may be several orchestrators
_PLAYGROUND = Path(__file__).parent / "playground"
_PAGE = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

Endpoint = Callable[[Request], Awaitable[Response]]
AnyAnswer = Answer | ResponsesAnswer
T = TypeVar("T")


class Gateway:
    """The endpoints. ``client`` calls the orchestrators with each caller's key. ``scrape``: of this process."""

    def __init__(self, client: Client, settings: GatewaySettings, scrape: Scrape) -> None:
        self._client = client
        self._settings = settings
        self._metrics = Metrics()
        self._scrape = scrape
        self._formats = Formats(settings.tool_format, settings.reasoning_format == "think")
        self._bodies = Bodies(settings.accept_unknown_fields)
        self._waiting = Waiting()
        self._scrape_key: str | None = None  # the last one that an orchestrator took
        self._served_models = ServedModels(settings.served_model_name)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._served(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._served(self._chat), methods=["POST"]),
            Route("/v1/responses", self._served(self._responses), methods=["POST"]),
            Route("/v1/models", self._served(self._models)),
            Route("/v1/models/{name:path}", self._served(self._model)),
            Route("/tokenize", self._served(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._served(self._detokenize), methods=["POST"]),
            Route("/tokenizer_info", self._served(self._tokenizer_info)),
            Route("/health", self._health),
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._served(self._load)),
            Route("/metrics", self._served(self._metrics_page)),
            Route("/openapi.json", self._openapi),
            Route("/", self._playground),
            Route("/playground", self._playground),
            Route("/playground/", self._one_above),
            Mount("/playground", StaticFiles(directory=_PLAYGROUND)),
        ]
        middleware = []
        if self._settings.host in ("127.0.0.1", "::1", "localhost"):
            # A web page under a name that leads to this machine must not reach what has no keys.
            middleware.append(Middleware(callers.ThisMachineOnly, self._settings.allowed_hosts))
        if self._settings.allowed_origins:
            middleware.append(Middleware(callers.Pages, self._settings.allowed_origins))
        if self._settings.root_path:
            middleware.append(Middleware(callers.UnderPath, self._settings.root_path))
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: _refused, Exception: _failed},
        )

    def end(self) -> None:
        """Requests that still run get an error as the rest of their answers."""
        self._waiting.end()

    # --- generation --------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        body, requests = await self._read(request, CompletionBody, translation.of_completion)
        return await self._generate(request, body, requests)

    async def _chat(self, request: Request) -> Response:
        body, fields = await self._read(request, ChatBody, translation.of_chat)
        return await self._generate(request, body, [self._formats.asked(body, fields)])

    async def _responses(self, request: Request) -> Response:
        body, (chat, fields) = await self._read(request, ResponsesBody, translation.of_responses)
        requests = [self._formats.asked(chat, fields)]
        return await self._generate(request, chat, requests, kind=partial(ResponsesAnswer, body))

    async def _generate(
        self,
        request: Request,
        body: ChatBody | CompletionBody,
        requests: Sequence[dict[str, Any]],
        kind: Callable[[Answer], AnyAnswer] = lambda answer: answer,
    ) -> Response:
        """``kind``: what becomes of the answer of chat or completions."""
        model, adapter = await self._served_models.checked(body.model, partial(self._info, request))
        if adapter:
            requests = [{**fields, "adapter": adapter} for fields in requests]
        request_id = body.request_id or request.state.request_id
        request.state.request_id = request_id
        parser = self._formats.parser(body, self._served_models.template) if isinstance(body, ChatBody) else Parser
        answer = kind(Answer(body, len(requests), request_id, model, parser))
        source = responses(self._client, requests, callers.metadata_of(request), self._settings.request_timeout_s)
        with translation.names_of(body):
            if not body.stream:
                return Json(await self._waiting.while_connected(request, _whole(answer, source)))
            # What is wrong is an HTTP error, so the answer begins with the admission.
            first = await self._waiting.while_connected(request, anext(source))
        stream = self._stream(answer, first, source, request_id=request_id)
        return sse.Streaming(stream, answer.failed, self._settings.keep_alive_s, waiting=self._waiting)

    @asynccontextmanager
    async def _stream(
        self, answer: AnyAnswer, first: Any, source: AsyncGenerator[Any, None], request_id: str
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of an answer, which counts by how it ends."""
        status = 499  # the client has left

        async def events() -> AsyncGenerator[bytes, None]:
            nonlocal status
            try:
                for chunk in answer.chunks(*first):
                    yield sse.event(chunk)
                with translation.names_of(answer.body):
                    async for prompt, response in source:
                        for chunk in answer.chunks(prompt, response):
                            yield sse.event(chunk)
                for chunk in answer.ends():
                    yield sse.event(chunk)
                status = 200
                if isinstance(answer, Answer):
                    yield sse.DONE
            except Exception as error:
                broken = _answer_to(error, request_id)
                status = broken.status
                for chunk in answer.failed(broken):
                    yield sse.event(chunk)

        with self._metrics.streaming():
            try:
                async with aclosing(source), aclosing(events()) as running:
                    yield running
            finally:
                if status == 499 and self._waiting.has_ended:
                    status = shutting_down().status
                self._metrics.ended(answer.route, status)

    # --- everything else ---------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return Json({"object": "list", "data": await self._described(request)})

    async def _model(self, request: Request) -> Response:
        models, name = await self._described(request), request.path_params["name"]
        for model in models:
            if name == model["id"]:
                return Json(model)
        raise unknown_model(name, [model["id"] for model in models])

    async def _described(self, request: Request) -> list[dict[str, Any]]:
        info = await self._info(request)
        if not info.HasField("target"):
            raise unavailable("no target is ready")
        return self._served_models.described(info)

    async def _tokenize(self, request: Request) -> Response:
        body, fields = await self._read(request, TokenizeBody, translation.of_tokenize)
        with translation.names_of(body):
            prompt = await self._client.tokenize(metadata=callers.metadata_of(request), **fields)
        info = await self._info(request)
        strings = [data.decode("utf-8", "replace") for data in prompt.tokens]
        return Json(
            {
                "count": len(prompt.token_ids),
                "max_model_len": info.target.context_length,
                "tokens": list(prompt.token_ids),
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    async def _detokenize(self, request: Request) -> Response:
        body, ids = await self._read(request, DetokenizeBody, lambda body: body.tokens)
        with translation.names_of(body):
            return Json({"prompt": await self._client.detokenize(ids, metadata=callers.metadata_of(request))})

    async def _tokenizer_info(self, request: Request) -> Response:
        info = await self._info(request)
        if not info.HasField("tokenizer"):
            raise HttpError(404, "this server has no tokenizer")
        names = ("bos_token", "eos_token", "chat_template")
        return Json({name: getattr(info.tokenizer, name) or None for name in names})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if await self._client.serving() else 503)

    async def _ping(self, _: Request) -> Response:
        return Response()

    async def _version(self, _: Request) -> Response:
        return Json({"version": version("specdec")})

    async def _load(self, request: Request) -> Response:
        info = await self._info(request)
        return Json({"server_load": info.live_sequences + info.waiting_requests})

    async def _metrics_page(self, request: Request) -> Response:
        key = request.headers.get("authorization", "")
        try:
            await self._client.server_info(_SCRAPE_S, metadata=callers.metadata_of(request))  # it checks the key
            self._scrape_key = key
        except (Unauthenticated, PermissionDenied):
            raise
        except SpecdecError:  # without an orchestrator, the metrics say so
            if self._scrape_key is not None and not secrets.compare_digest(key.encode(), self._scrape_key.encode()):
                raise
        return Response(await asyncio.to_thread(self._scrape.text), media_type=CONTENT_TYPE)

    async def _playground(self, _: Request) -> Response:
        return FileResponse(_PLAYGROUND / "index.html", headers=_PAGE)

    async def _one_above(self, _: Request) -> Response:
        return RedirectResponse("../playground")

    async def _openapi(self, _: Request) -> Response:
        return Json(document(self._settings.root_path))

    async def _info(self, request: Request) -> generation_pb2.GetServerInfoResponse:
        """What an orchestrator is. Raises SpecdecError, for an unknown key, too."""
        return await self._client.server_info(metadata=callers.metadata_of(request))

    async def _read(self, request: Request, kind: type[Body], translate: Callable[[Body], T]) -> tuple[Body, T]:
        return await self._bodies.read(request, kind, translate, partial(self._info, request))

    # --- what surrounds a request ------------------------------------------------------------------------------

    def _served(self, endpoint: Endpoint) -> Endpoint:
        """``endpoint`` with the request's id, the errors as answers, and a count."""
        route = endpoint.__name__.strip("_")

        async def serve(request: Request) -> Response:
            started = time.monotonic()
            request.state.request_id = callers.request_id(request)
            try:
                callers.check_page(request, self._settings.allowed_origins)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = _answer_to(error, request.state.request_id).response()
            response.headers["x-request-id"] = request.state.request_id
            self._metrics.began(route, time.monotonic() - started)
            if not isinstance(response, StreamingResponse):
                self._metrics.ended(route, response.status_code)
            return response

        return serve


def _answer_to(error: Exception, request_id: str) -> HttpError:
    if not isinstance(error, (SpecdecError, HttpError)):
        log.error("a request failed", exc_info=error, extra={"request_id": request_id})
    elif isinstance(error, HIDDEN):
        log.warning("a request failed", extra={"request_id": request_id, "problem": str(error)})
    return http_error(error)


async def _whole(answer: AnyAnswer, source: AsyncGenerator[Any, None]) -> dict[str, Any]:
    async with aclosing(source):
        async for prompt, response in source:
            answer.collect(prompt, response)
    return answer.whole()


async def _refused(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that it has not."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:256]}"
    if error.status_code == 404:
        return HttpError(404, f"there is no {asked}; there are {', '.join(PATHS)}").response()
    allowed = (error.headers or {}).get("Allow", "")
    message = f"{error.detail}: {asked}" + (f", but {allowed}" if allowed else "")
    return HttpError(error.status_code, message, headers=error.headers).response()


async def _failed(_: Request, error: Exception) -> Response:
    return http_error(error).response()
