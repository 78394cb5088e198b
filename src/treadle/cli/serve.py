"""`treadle serve`: a model over HTTP, with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import typer

from treadle.cli import verb_app
from treadle.config import UserError

app = verb_app("Serve a model over HTTP, with OpenAI's and Anthropic's APIs. Flags have vLLM's names where it has one.")


@app.command()
def serve(
    ctx: typer.Context,
    model: str = typer.Argument(None, help="A Hugging Face directory, a checkpoint or a GGUF file."),
    config: str = typer.Option(None, help="A YAML file with any of these settings; flags win over it."),
    host: str = typer.Option(None, help="The address to listen on (default 127.0.0.1: reached from here only)."),
    port: int = typer.Option(None, help="The port (default 8000); 0 takes any free one and says which."),
    api_key: str = typer.Option(None, envvar="TREADLE_API_KEY", help="Require this key (Authorization: Bearer KEY)."),
    admin_key: str = typer.Option(
        None, envvar="TREADLE_ADMIN_KEY", help="Allow changes to the running server (/admin/...) with this key."
    ),
    ssl_certfile: str = typer.Option(None, help="Serve https with this certificate (PEM)."),
    ssl_keyfile: str = typer.Option(None, help="The certificate's key, where it is not in the same file."),
    allowed_origins: list[str] = typer.Option(
        [], help="A web page's origin that may call this server (CORS); repeat it for more. None by default."
    ),
    served_model_name: list[str] = typer.Option(
        [], help="The name that clients ask for (default: the file's or folder's); repeat it for more."
    ),
    dtype: str = typer.Option(None, help="auto (the checkpoint's), float32, bfloat16 or float16."),
    device: str = typer.Option(None, help="cpu, cuda, ... (default: the accelerator, where there is one)."),
    max_num_seqs: int = typer.Option(None, help="Sequences at once (default: 16, fewer if memory is short)."),
    max_model_len: int = typer.Option(
        None, help="Tokens of the longest sequence with its answer (default: the model's, less if memory is short)."
    ),
    max_num_batched_tokens: int = typer.Option(None, help="Tokens that one step computes at most (default 2048)."),
    kv_cache_dtype: str = typer.Option(None, help="auto (the model's), float32, bf16, fp8, int8 or int4."),
    kv_cache_memory: str = typer.Option(None, help="Memory of the key-value cache, such as 4GiB (default: what fits)."),
    block_size: int = typer.Option(None, help="Tokens of a block of the key-value cache (default 16)."),
    enable_prefix_caching: bool = typer.Option(
        None,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse what prompts begin alike with (on).",
    ),
    enable_chunked_prefill: bool = typer.Option(
        None, "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Compute long prompts in pieces (on)."
    ),
    num_speculative_tokens: int = typer.Option(
        None, help="Guess so many tokens at most by prompt lookup where it pays (default 0: off)."
    ),
    batch: str = typer.Option(
        None, help='Dynamic batching, as JSON: {"min_size", "max_size", "max_latency_ms", "strategy": "length_aware"}.'
    ),
    deterministic: bool = typer.Option(
        None, "--deterministic", help="The same tokens whatever else is in the batch or the cache; slower."
    ),
    check_blocks: bool = typer.Option(None, "--check-blocks", help="Verify the cache's bookkeeping after every step."),
    seed: int = typer.Option(None, help="Makes requests that carry no seed repeatable, in their order."),
    tensor_parallel_size: int = typer.Option(None, "--tensor-parallel-size", "-tp", help="Ranks that share a layer."),
    pipeline_parallel_size: int = typer.Option(
        None, "--pipeline-parallel-size", "-pp", help="Stages that share the layers."
    ),
    data_parallel_size: int = typer.Option(
        None,
        "--data-parallel-size",
        "-dp",
        help="Engines, each with the whole model; prompts follow their prefix.",
    ),
    nnodes: int = typer.Option(None, help="Machines that the ranks of one engine are spread over."),
    node_rank: int = typer.Option(None, help="Which of them this is; only node 0 serves, the others join it."),
    master_addr: str = typer.Option(None, help="Node 0's address."),
    master_port: int = typer.Option(None, help="A free port of node 0."),
    worker_timeout: float = typer.Option(
        None, help="Seconds that a rank waits for another within a step before that counts as hanging (default 60)."
    ),
    tool_call_parser: str = typer.Option(None, help="How the model writes tool calls: auto, hermes, llama3, ..."),
    reasoning_parser: str = typer.Option(None, help="How the model marks its reasoning: auto, none, ..."),
    trust_remote_code: bool = typer.Option(None, "--trust-remote-code", help="Accepted; no remote code is ever run."),
    shutdown_timeout: float = typer.Option(
        None, help="Seconds that running requests get to finish at the end (default 30)."
    ),
) -> None:
    # Until requests are served there is nothing to finish: being asked to stop is a good end at once.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        from treadle.serve.launch import serve as run
        from treadle.serve.settings import read_settings

        given: dict[str, Any] = {name: value for name, value in ctx.params.items() if name != "config"}
        if batch is not None:
            given["batch"] = _json("--batch", batch)
        run(read_settings(config, given))
    finally:
        signal.signal(signal.SIGTERM, before)


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{flag} must be JSON, such as '{{\"max_latency_ms\": 50}}': {error}") from error
