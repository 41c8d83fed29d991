"""The part of the Hugging Face hub's HTTP interface that reading a public dataset needs, for one folder."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


@contextmanager
def serve(folder: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one dataset, at one commit, and the list of what it is asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            if found := re.fullmatch(rf"/api/datasets/{name}(?:/revision/(main|{COMMIT}))?", path):
                self.answer(json.dumps({"id": name, "_id": "0", "sha": COMMIT, "tags": [], "siblings": []}).encode())
            elif path.startswith(f"/api/datasets/{name}/revision/"):
                self.answer(b"", code=404, headers={"X-Error-Code": "RevisionNotFound"})
            elif found := re.fullmatch(rf"/api/datasets/{name}/tree/{COMMIT}(?:/(.*))?", path):
                self.tree(folder / (found[1] or ""))
            elif found := re.fullmatch(rf"/datasets/{name}/resolve/{COMMIT}/(.*)", path):
                self.file(folder / found[1])
            else:
                code = "RepoNotFound" if path.startswith("/api/datasets/") else "EntryNotFound"
                self.answer(b"", code=404, headers={"X-Error-Code": code})

        def tree(self, below: Path) -> None:
            entries = [
                {
                    "type": "directory" if entry.is_dir() else "file",
                    "oid": "0" * 40,
                    "size": entry.stat().st_size,
                    "path": entry.relative_to(folder).as_posix(),
                }
                for entry in sorted(below.iterdir())
            ]
            self.answer(json.dumps(entries).encode())

        def file(self, path: Path) -> None:
            if not path.is_file():
                self.answer(b"", code=404, headers={"X-Error-Code": "EntryNotFound"})
                return
            content = path.read_bytes()
            headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                self.answer(content[first : last + 1], code=206, headers=headers)
            else:
                self.answer(content, headers=headers)

        def answer(self, content: bytes, *, code: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
