"""Stands in for `sglang.launch_server` where only its life matters: `python stand_in.py PORT MODEL [how]`.

`how` (also the file STAND_IN_HOW names, read at the start): a JSON object with any of `delay` (seconds before it
answers), `hold` (a file: it does not answer before that is there), `die` (words it says before it exits with status 1),
`model`, `context`, `kv_tokens` (what it says of itself),
`mute` (it never answers a prompt), `full` (so many prompts are answered, and all later ones wait without end).
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def settings(arguments: list[str]) -> dict[str, Any]:
    named = os.environ.get("STAND_IN_HOW")
    text = arguments[0] if arguments else Path(named).read_text() if named and Path(named).exists() else "{}"
    return dict(json.loads(text))


def main(port: int, model: str, how: dict[str, Any]) -> None:
    print(f"loading {model}", flush=True)
    if "die" in how:
        print(how["die"], flush=True)
        raise SystemExit(1)
    time.sleep(how.get("delay", 0))
    while "hold" in how and not Path(how["hold"]).exists():
        time.sleep(0.02)
    info = {
        "model_path": how.get("model", model),
        "revision": None,
        "context_length": how.get("context", 512),
        "max_total_num_tokens": how.get("kv_tokens", 100_000),
    }

    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"/server_info": info}.get(self.path))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(1)
            if len(asked) > how.get("full", len(asked)):
                time.sleep(3600)
            if how.get("mute"):
                self.send_error(500)
                return
            meta = {"finish_reason": {"type": "length"}, "completion_tokens": 4}
            self.reply({"output_ids": [5, 6, 7, 8], "meta_info": meta})

        def reply(self, value: Any) -> None:
            data = json.dumps(value).encode() if value is not None else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    print(f"ready on {port}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], settings(sys.argv[3:]))
