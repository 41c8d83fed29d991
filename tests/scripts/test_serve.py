"""scripts/serve.py as a process: its API, its page, and clients that leave, ask for too much or come from elsewhere."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from recipes.files.screen import safe
from tests.commands import run_command
from tests.processes import wait_for
from tests.tiny_llama import save_tiny_llama

pytest.importorskip("aiohttp", reason="the server's library is not installed: pip install -e '.[serve]'")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 50_000
"""Tokens: an answer that fills it takes longer than any test."""
TEMPLATE = """{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('system messages are not supported') }}{% endif %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folders(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small random model that never ends by itself: with a chat template, and without one."""
    from safetensors.torch import load_file, save_file

    place = tmp_path_factory.mktemp("serve")
    plain = save_tiny_llama(place, corpus, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"][json.loads((plain / "config.json").read_text())["eos_token_id"]] = 0
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    chats = Path(shutil.copytree(plain, place / "chats"))
    (chats / "chat_template.jinja").write_text(TEMPLATE)
    return chats, plain


class Served:
    """A server in a process of its own."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, ROOT / "scripts/serve.py", *words, "--port", "0", "--waiting", "2"]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        while self.lines[-1] and not self.lines[-1].startswith("http"):
            self.lines.append(self.process.stdout.readline())
        address = urlsplit(self.lines[-1].strip())
        assert address.port is not None, self.process.communicate()
        self.port, self.token = address.port, address.fragment.removeprefix("token=")

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> tuple[int, Any, HTTPResponse]:
        """Status, content and answer. body: JSON, or bytes as they are."""
        with closing(self.begin(path, body, method=method, **headers)) as connection:
            response = connection.getresponse()
            content = response.read().decode()
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(content), response
            return response.status, content, response

    def begin(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> HTTPConnection:
        """A request whose answer has not been read."""
        connection = HTTPConnection("127.0.0.1", self.port)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        return connection

    def text(self, **fields: Any) -> Any:
        status, content, _ = self.ask("/v1/completions", {"prompt": "def main(", "temperature": 0} | fields)
        assert status == 200, content
        return content["choices"][0]

    def end(self) -> tuple[int, str]:
        """Ctrl-C. Returns the exit code and what was said about errors."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate()
        return self.process.returncode, err


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Served]:
    served = Served(*folders)
    yield served
    assert served.end() == (0, "")


def events(connection: HTTPConnection) -> Iterator[Any]:
    """The events of a stream."""
    for line in connection.getresponse():
        if line.strip():
            assert line.startswith(b"data: "), line
            content = line.removeprefix(b"data: ").strip()
            yield content.decode() if content == b"[DONE]" else json.loads(content)


def endless(server: Served) -> HTTPConnection:
    return server.begin("/v1/chat/completions", {"messages": HELLO, "stream": True, "temperature": 0})


def test_the_models_are_listed_with_their_lengths_and_whether_they_chat(
    server: Served, folders: tuple[Path, Path]
) -> None:
    status, content, _ = server.ask("/v1/models")
    assert (status, content["object"]) == (200, "list")
    assert [(one["id"], one["context"], one["chat"]) for one in content["data"]] == [
        (str(folders[0]), CONTEXT, True),
        (str(folders[1]), CONTEXT, False),
    ]
    assert "cannot chat: the tokenizer came without a chat template" in server.lines[1]


def test_the_page_is_one_file_that_asks_for_nothing_from_elsewhere(server: Served) -> None:
    status, page, response = server.ask("/")
    assert status == 200 and "connect-src 'self'" in str(response.headers["Content-Security-Policy"])
    assert not re.search(r"https?://|//\w+\.\w+|<(script|link|img)[^>]+(src|href)=.(?!data:)", page)


def test_a_text_is_continued_as_generate_does(server: Served, folders: tuple[Path, Path]) -> None:
    words = [str(folders[0]), "def main(", "--greedy", "--max-tokens", "20", "--answer-only"]
    code, out, err = run_command("scripts/generate.py", *words)
    assert code == 0, err
    choice = server.text(max_tokens=20)
    assert (safe(choice["text"]) + "\n", choice["finish_reason"]) == (out, "length")  # a screen gets no control codes
    sampled = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_tokens": 20}
    texts = [server.text(**sampled, seed=seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stream_is_the_text_of_the_whole_answer_in_pieces(server: Served) -> None:
    asked = {"messages": HELLO, "max_tokens": 30, "temperature": 0}
    _, whole, _ = server.ask("/v1/chat/completions", asked)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with closing(server.begin("/v1/chat/completions", asked | options)) as connection:
        *chunks, done = events(connection)
    assert done == "[DONE]" and len(chunks) > 10
    choices = [chunk["choices"][0] for chunk in chunks]
    message = {"role": "assistant", "content": "".join(choice["delta"]["content"] for choice in choices)}
    assert whole["choices"] == [{"index": 0, "message": message, "finish_reason": "length"}]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["usage"] == whole["usage"] and whole["usage"]["completion_tokens"] == 30


def test_a_stop_string_ends_the_text_before_it(server: Served) -> None:
    text = server.text(max_tokens=60)["text"]
    stop = text[20:25]
    for given in (stop, ["not there" * 100_000, stop]):
        choice = server.text(max_tokens=60, stop=given)
        assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        (b"{", 400, "the request is not a JSON object: "),
        (b"[1]", 400, "the request is not a JSON object: "),
        (b'{"prompt": "\\ud800"}', 400, "the request is not a JSON object: "),
        (b"\xff\xfe", 400, "the request is not a JSON object: "),
        (b"[" * 100_000, 400, "the request is not a JSON object: "),
        ({"surprise": 1}, 400, "surprise = 1: not possible here"),
        ({"n": 2}, 400, "n = 2: not possible here"),
        ({"logprobs": 3, "best_of": 4}, 400, "best_of = 4: not possible here"),
        ({"temperature": -1}, 400, "temperature = -1.0: must be 0 (greedy), or 0.001 or more"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature = nan: must be 0 (greedy), or 0.001 or more"),
        ({"temperature": "hot"}, 400, 'temperature = "hot": Input should be a valid number'),
        ({"top_p": 0, "seed": -1}, 400, "top_p = 0.0: must be above 0 and at most 1\nseed = -1: must be 0 or more"),
        ({"stop": ["a"] * 17}, 400, "at most 16 items"),
        ({"max_tokens": 0}, 400, "max_tokens = 0: must be 1 or more"),
        ({"max_tokens": CONTEXT}, 400, "and at most 50,000 together"),
        ({"prompt": "word " * 200_000}, 400, "and at most 50,000 together"),
        ({"prompt": ["one", "two"]}, 400, 'prompt = ["one","two"]: Input should be a valid string'),
        ({"prompt": None}, 400, "prompt: missing"),
        ({"model": "gpt"}, 404, "no model 'gpt' here; write "),
        ({"prompt": "x" * (5 << 20)}, 413, "Maximum request body size"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(
    server: Served, fields: Any, status: int, message: str
) -> None:
    body = fields if isinstance(fields, bytes) else {"prompt": "a"} | fields
    found, content, _ = server.ask("/v1/completions", body)
    assert found == status and message in content["error"]["message"], content
    assert content["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "messages: missing"),
        ({"messages": []}, "messages: missing"),
        ({"messages": [{"role": "user"}]}, 'messages.0.content = {"role":"user"}: Field required'),
        ({"messages": [{"role": "system", "content": "be brief"}, *HELLO]}, "system messages are not supported"),
        ({"messages": HELLO, "model": "PLAIN"}, "cannot chat: the tokenizer came without a chat template"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused_with_the_reason(
    server: Served, folders: tuple[Path, Path], fields: Any, message: str
) -> None:
    if "model" in fields:
        fields = fields | {"model": str(folders[1])}
    status, content, _ = server.ask("/v1/chat/completions", fields)
    assert status == 400 and message in content["error"]["message"], content


def test_a_client_that_leaves_makes_room_for_the_next(server: Served) -> None:
    with closing(endless(server)) as connection:
        next(events(connection))
        waiting = server.begin("/v1/completions", {"prompt": "a", "max_tokens": CONTEXT // 2})
        waiting.close()
    assert server.text(max_tokens=5)["finish_reason"] == "length"


def test_a_client_that_reads_too_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.evaluation import serve

    written = list[bytes]()

    class Slow(serve.web.StreamResponse):
        async def prepare(self, request: Any) -> None:
            pass

        async def write(self, data: Any) -> None:
            written.append(data)
            await asyncio.sleep(0.02)  # each time it reads a little, so that no single wait is long

    async def parts() -> AsyncIterator[str]:
        for _ in range(1000):
            yield "text"

    monkeypatch.setattr(serve, "STALLED", 0.2)
    monkeypatch.setattr(serve.web, "StreamResponse", Slow)
    request = Mock()
    asyncio.run(serve.Server({}, token="", waiting=2)._streamed(request, parts(), lambda text, **_: text))
    request.transport.abort.assert_called_once_with()
    assert 1 < len(written) <= 11


def test_more_requests_than_may_wait_are_refused_at_once(server: Served) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(closing(endless(server)))
            next(events(connection))  # it is answered, or waits
        status, content, _ = server.ask("/v1/completions", {"prompt": "a"})
        assert (status, content["error"]["code"]) == (429, "queue_full")
        assert content["error"]["message"] == "2 requests wait already; try again later"
    wait_for("an answer", lambda: server.ask("/v1/completions", {"prompt": "a"})[0] == 200)


def test_pages_of_other_sites_are_refused(server: Served) -> None:
    own = f"127.0.0.1:{server.port}"
    assert server.ask("/v1/models", Origin=f"http://{own}")[0] == 200
    assert server.ask("/v1/models", Host=f"localhost:{server.port}")[0] == 200
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": f"evil.example:{server.port}"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": ""},
    ):
        for path, body in (("/", None), ("/v1/models", None), ("/v1/completions", {"prompt": "a"})):
            status, content, response = server.ask(path, body, **headers)
            assert status == 403 and content["error"]["message"], headers
            assert "Access-Control-Allow-Origin" not in response.headers


def test_garbage_and_unknown_paths_do_not_stop_the_server(server: Served) -> None:
    with ExitStack() as stack:
        for garbage in (b"\xff" * 4096, b"GET / HTTP/9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n", b""):
            rude = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            rude.sendall(garbage)
        assert server.text(max_tokens=1)["finish_reason"] == "length"
    assert server.ask("/v1/embeddings", {})[1]["error"]["message"] == "404: Not Found"
    assert server.ask("/v1/completions", method="DELETE")[0] == 405


def test_a_server_for_other_machines_asks_for_a_token_and_keeps_its_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "replaced"))
    server = Served(folder, "--host", "0.0.0.0")
    assert len(server.token) > 20
    key = {"Authorization": f"Bearer {server.token}", "Host": "elsewhere.example"}
    body = {"prompt": "def ", "max_tokens": 8, "temperature": 0}
    assert server.ask("/", Host="elsewhere.example")[0] == 200  # which holds no secret
    for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": server.token}, {"Authorization": "é"}):
        status, content, _ = server.ask("/v1/completions", body, **wrong)
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
    before = server.ask("/v1/completions", body, **key)[1]["choices"]
    (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
    (folder / "chat_template.jinja").unlink()
    assert server.ask("/v1/completions", body, **key)[1]["choices"] == before
    stream = server.begin("/v1/chat/completions", {"messages": HELLO, "stream": True, "temperature": 0}, **key)
    next(events(stream))
    assert server.end() == (0, "")  # in the middle of an answer
    stream.close()


def test_what_cannot_be_served_is_refused_in_one_line(folders: tuple[Path, Path], server: Served) -> None:
    for words, message in (
        ((folders[0], "--port", server.port), "Address already in use"),
        ((folders[0], "--port", "99999"), "--port 99999: "),
        ((folders[0].parent / "missing", "--port", "0"), "missing does not exist"),
        ((folders[1], "--port", "0", "--chat-template", "missing.jinja"), "missing.jinja"),
    ):
        code, out, err = run_command("scripts/serve.py", *words)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1, err


def test_the_client_library_of_the_api_is_answered(server: Served, folders: tuple[Path, Path]) -> None:
    openai = pytest.importorskip("openai", reason="the client library openai is not installed")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        name, plain = (model.id for model in client.models.list())
        asked = {"model": name, "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 12
        pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(pieces) == whole.choices[0].message.content
        text = client.completions.create(model=plain, prompt="def main(", max_tokens=20, temperature=0)
        assert text.choices[0].text == server.text(max_tokens=20)["text"]
        with pytest.raises(openai.BadRequestError, match="n = 2: not possible here"):
            client.chat.completions.create(**asked, n=2)
        with pytest.raises(openai.NotFoundError, match="no model 'gpt' here"):
            client.completions.create(model="gpt", prompt="a")
