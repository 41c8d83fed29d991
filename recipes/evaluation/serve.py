"""A page for chats, and the completions API under it, by HTTP. One answer is written at a time; the others wait."""

import asyncio
import json
import logging
import re
import secrets
import socket
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from parallel.errors import UserError
from recipes.evaluation.completions import Answer, Refusal, prepared
from recipes.evaluation.generate import ReadyModel

PAGE = Path(__file__).with_suffix(".html")
POLICY = "default-src data: 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"
MOST_BYTES = 4 << 20  # of a request
STALLED = 30.0  # seconds that an answer waits in all for a client that does not read; then it is left


class Server:
    def __init__(self, models: Mapping[str, ReadyModel], *, token: str, waiting: int) -> None:
        """token: what requests must bring; "" = nothing, but they must call this machine localhost. waiting: how many
        may wait for the one that is answered."""
        self._models, self._token, self._most = models, token, waiting
        self._count, self._turn, self._thread = 0, asyncio.Lock(), ThreadPoolExecutor(1)

    def run(self, listener: socket.socket) -> None:
        """Answer until SIGINT or SIGTERM."""
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # tracebacks of what is not HTTP
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/{kind:completions|chat/completions}", self._complete)
        web.run_app(app, sock=listener, print=None, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)

    @web.middleware
    async def _guard(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            self._require_allowed(request)
            return await handler(request)
        except Exception as error:
            return web.json_response(_problem(error), status=getattr(error, "status", 500))

    def _require_allowed(self, request: Any) -> None:
        """Raises Refusal for what pages of other sites ask for, also by a name that they let lead to this machine (DNS
        rebinding), and for what comes without the token."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._token and not re.fullmatch(r"(localhost|127\.0\.0\.1|\[::1])(:\d+)?", host):
            raise Refusal(f"this server answers as localhost, not as {host!r}; start it with --token for that", 403)
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(f"pages of {origin!r} may not ask this server", 403)
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._token and request.path != "/" and not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
            raise Refusal("write the token that the server printed, as the API key", 401, "invalid_api_key")

    async def _page(self, request: Any) -> Any:
        return web.FileResponse(PAGE, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    async def _list(self, request: Any) -> Any:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "shardwright"}
            | {"context": model.context, "chat": model.template is not None}
            for name, model in self._models.items()
        ]
        return web.json_response({"object": "list", "data": models})

    async def _complete(self, request: Any) -> Any:
        chat = request.match_info["kind"] != "completions"
        answer = await asyncio.to_thread(prepared, await request.read(), self._models, chat=chat)
        if self._count > self._most:
            raise Refusal(f"{self._most} requests wait already; try again later", 429, "queue_full")
        self._count += 1
        try:
            async with aclosing(self._parts(answer)) as parts:
                shaped = partial(_shaped, answer, f"shardwright-{secrets.token_hex(12)}", int(time.time()), chat)
                if answer.asked.stream:
                    return await self._streamed(request, parts, shaped)
                *pieces, end = [part async for part in parts]
                return web.json_response(shaped("".join(pieces), end))
        finally:
            self._count -= 1

    async def _parts(self, answer: Answer) -> AsyncGenerator[Any, None]:
        """What the answer yields, when its turn has come; no more when this ends, as it does when the client leaves."""
        async with self._turn:
            parts, loop = answer.write(), asyncio.get_running_loop()
            while (part := await loop.run_in_executor(self._thread, next, parts, None)) is not None:
                yield part

    async def _streamed(self, request: Any, parts: AsyncIterator[Any], shaped: Callable[..., Any]) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        patience = STALLED

        async def send(content: Any) -> None:
            nonlocal patience
            began = time.monotonic()
            async with asyncio.timeout(patience):
                await response.write(f"data: {content if content == '[DONE]' else json.dumps(content)}\n\n".encode())
            patience -= time.monotonic() - began

        await response.prepare(request)
        try:
            await send(shaped("", begins=True))
            async for part in parts:
                await send(shaped(part) if isinstance(part, str) else shaped("", part))
            await send("[DONE]")
        except (TimeoutError, ConnectionError):
            if request.transport:
                request.transport.abort()
        except Exception as error:  # too late for another status
            await send(_problem(error))
        return response


def _shaped(
    answer: Answer, number: str, created: int, chat: bool, text: str, end: Any = None, *, begins: bool = False
) -> dict[str, Any]:
    """A piece of an answer, or a whole one, as the API has it. begins: whether it is the first piece of a stream."""
    stream, choice = answer.asked.stream, {"index": 0, "finish_reason": end and end[0]}
    if chat:
        role = {"role": "assistant"} if begins or not stream else {}
        choice["delta" if stream else "message"] = role | {"content": text}
    else:
        choice["text"] = text
    kind = f"chat.completion{'.chunk' if stream else ''}" if chat else "text_completion"
    shaped = {"id": number, "object": kind, "created": created, "model": answer.model, "choices": [choice]}
    if end and (not stream or answer.asked.stream_options.get("include_usage")):
        prompt, tokens = len(answer.prompt_ids), end[1]
        shaped["usage"] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return shaped


def _problem(error: Exception) -> dict[str, Any]:
    if not isinstance(error, UserError | web.HTTPException):
        traceback.print_exception(error)
    about = {"type": "invalid_request_error", "param": None, "code": getattr(error, "code", None)}
    return {"error": {"message": getattr(error, "text", "") or str(error) or repr(error)} | about}
