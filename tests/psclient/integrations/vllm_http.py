"""A server with the routes of ``vllm serve`` for weight updates, over workers that have real engines of the plugin."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.psclient.integrations.vllm_interface import make_engine


class VllmProcess:
    """One ``vllm serve``: its workers, and the calls that it got."""

    def __init__(self, models, port=0, *, in_dev_mode=True):
        self.models, self.engines = models, [make_engine(model) for model in models]
        self.is_paused = self.is_updating = False
        self.weight_version, self.calls = "default", []
        process = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                address = urlsplit(self.path)
                status, said = 404, {"detail": "Not Found"}
                if in_dev_mode:
                    try:
                        process.answer(address.path, parse_qs(address.query), json.loads(body or b"{}"))
                        status, said = 200, {}
                    except Exception as error:
                        status, said = 500, {"error": {"message": str(error)}}
                answer = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def answer(self, path, query, body):
        self.calls.append(path)
        if path == "/pause":
            assert query == {"mode": ["keep"]}
            self.is_paused = True
        elif path == "/resume":
            self.is_paused = False
        elif path == "/init_weight_transfer_engine":
            for engine in self.engines:
                engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
        elif path == "/start_weight_update":
            if self.is_updating:
                raise RuntimeError("start_weight_update called while a weight update is already active")
            for engine in self.engines:
                engine.start_weight_update()
            self.is_updating = True
        elif path == "/update_weights":
            assert self.is_updating
            for engine in self.engines:
                engine.update_weights(body["update_info"])
        elif path == "/finish_weight_update":
            assert self.is_updating
            self.is_updating = False
            self.weight_version = body.get("weight_version", self.weight_version)

    def die(self):
        """End as a killed process does: nothing listens at its port any more."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for engine in self.engines:
            engine.shutdown()
