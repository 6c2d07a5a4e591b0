"""A stand-in for the Hub on loopback: it creates a repository, takes its files over LFS, and commits."""

import base64
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_" + "s3cret" * 6


@dataclass
class Hub:
    private: bool = False  # what its repository is
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # of the last commit
    objects: dict[str, bytes] = field(default_factory=dict)  # of LFS, by their hash
    asked: list[str] = field(default_factory=list)

    def answer(self, path, body):
        """JSON for a request; None: there is no such path."""
        pull = f"{self.url}/me/int8/discussions/1" if "create_pr=1" in path else None
        path = path.partition("?")[0]
        answer = None
        if path == "/api/repos/create":
            self.private = self.private or json.loads(body).get("visibility") == "private"
            answer = {"url": f"{self.url}/me/int8"}
        elif path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = (("regular", "lfs")[name.endswith((".onnx", ".bin", ".engine"))] for name in names)
            pairs = zip(names, modes, strict=True)
            answer = {"files": [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in pairs]}
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}
            answer = {"transfer": "basic", "objects": objects}
        elif path.startswith("/lfs/"):
            self.objects[hashlib.sha256(body).hexdigest()] = body
            answer = {}
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                about = line["value"]
                if line["key"] == "file":
                    self.files[about["path"]] = base64.b64decode(about["content"])
                elif line["key"] == "lfsFile":
                    self.files[about["path"]] = self.objects[about["oid"]]
            url = f"{self.url}/me/int8/commit/{'0' * 40}"
            answer = {"commitUrl": url, "commitOid": "0" * 40, "pullRequestUrl": pull}
        elif path == "/api/models/me/int8":
            answer = {"id": "me/int8", "sha": "0" * 40, "private": self.private, "siblings": []}
        return answer


@contextmanager
def served_hub():
    """A Hub that takes requests with `TOKEN`; `url` is its endpoint."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _respond(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(f"{self.command} {self.path}")
            known = self.path.startswith("/lfs/") or self.headers["Authorization"] == f"Bearer {TOKEN}"
            value = hub.answer(self.path, body) if known else {"error": "Invalid token"}
            data = json.dumps(value).encode()
            self.send_response(404 if value is None else 200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _respond

        def log_message(self, *arguments):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
