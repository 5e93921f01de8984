"""AsyncEngine inside a FastAPI app of your own: one endpoint that streams plain text.

Run it with ``uvicorn --app-dir examples serve_async:app``, then::

    curl -N 'http://127.0.0.1:8000/ask?question=What+is+the+capital+of+France?'

For OpenAI's API there is no need to write one: ``fastserve.server.create_app``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from fastserve import AsyncEngine, SamplingParams

MODEL = "smollm2"
PARAMS = SamplingParams(max_tokens=128, temperature=0.0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model when the server starts, shut it down when the server ends."""
    async with AsyncEngine(MODEL) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    """Answer as the text comes. A client that goes away aborts its request."""
    return StreamingResponse(answer(app.state.engine, question), media_type="text/plain")


async def answer(engine: AsyncEngine, question: str) -> AsyncIterator[str]:
    """What each output adds: outputs say everything so far."""
    num_sent = 0
    messages = [{"role": "user", "content": question}]
    async with aclosing(engine.chat(messages, PARAMS)) as outputs:
        async for output in outputs:
            text = output.outputs[0].text
            yield text[num_sent:]
            num_sent = len(text)
