"""llama.cpp's server over loopback, with prompts of token ids and a stream for each answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

from peers.engines import StreamingEngine
from peers.workloads import Request

START_TIMEOUT_S = 120.0


class Llama(StreamingEngine):
    def start(self) -> None:
        binary, threads = self.options["binary"], str(self.options["threads"])
        self._port = _free_port()
        command = [binary, "-m", self.options["model"], "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "-t", threads, "-tb", threads, "--no-webui"]
        command += self.options["arguments"]
        about = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        number = re.search(r"version: (\S+)", about.stderr + about.stdout)
        source = self.options["source"]
        self.version = f"llama.cpp {number[1] if number else '?'} ({source})"
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not asyncio.run_coroutine_threadsafe(self._is_healthy(), self.loop).result():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"llama-server was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    async def _is_healthy(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
        except OSError:
            return False
        return b" 200 " in status

    async def stream(self, request: Request) -> AsyncIterator[int]:
        body = json.dumps(
            {
                "prompt": request.prompt,
                "n_predict": request.num_tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "return_tokens": True,
                "cache_prompt": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        head = (
            "POST /completion HTTP/1.1\r\nHost: local\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(500)).decode()}")
        while (await reader.readline()).strip():
            pass
        seen = 0
        async for event in _events(reader):
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            # A token whose text is not complete yet may come with a later one, or with the end.
            new = len(event.get("tokens", ())) or 1
            total = event["tokens_predicted"] if event.get("stop") else seen + new
            yield max(0, total - seen)
            seen = max(seen, total)
        writer.close()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of a chunked answer."""
    text = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        text += (await reader.readexactly(size + 2))[:-2]
        while b"\n\n" in text:
            event, text = text.split(b"\n\n", 1)
            if event.startswith(b"data: {"):
                yield json.loads(event[6:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
