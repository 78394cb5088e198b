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
    config: str = typer.Option(None, help="A YAML file with any of these settings; flags win over it (default: none)."),
    host: str = typer.Option(
        None, help="The address to listen on (default: 127.0.0.1, reached from this machine only)."
    ),
    port: int = typer.Option(None, help="The port; 0 takes any free one and says which (default: 8000)."),
    api_key: str = typer.Option(
        None,
        envvar="TREADLE_API_KEY",
        help="Require this key of clients, as Authorization: Bearer KEY (default: none is needed).",
    ),
    admin_key: str = typer.Option(
        None,
        envvar="TREADLE_ADMIN_KEY",
        help="Allow changes to the running server (/admin/...) with this key (default: nobody may).",
    ),
    ssl_certfile: str = typer.Option(None, help="Serve https with this certificate, a PEM file (default: http)."),
    ssl_keyfile: str = typer.Option(
        None, help="The certificate's key, a PEM file (default: it is in the certificate's)."
    ),
    allowed_origins: list[str] = typer.Option(
        [], help="A web page's origin that may call this server (CORS); repeat it for more (default: none)."
    ),
    served_model_name: list[str] = typer.Option(
        [], help="The name that clients ask for; repeat it for more (default: the file's or folder's)."
    ),
    dtype: str = typer.Option(
        None, help="float32, bfloat16, float16 or auto, which is the checkpoint's (default: auto)."
    ),
    device: str = typer.Option(None, help="cpu, cuda and so on (default: the accelerator, where there is one)."),
    max_num_seqs: int = typer.Option(None, help="Sequences at once (default: 16, fewer if memory is short)."),
    max_model_len: int = typer.Option(
        None, help="Tokens of the longest sequence with its answer (default: the model's, less if memory is short)."
    ),
    max_num_batched_tokens: int = typer.Option(None, help="Tokens that one step computes at most (default: 2048)."),
    kv_cache_dtype: str = typer.Option(
        None, help="float32, bf16, fp8, int8, int4 or auto, which is the model's (default: auto)."
    ),
    kv_cache_memory: str = typer.Option(
        None, help="Memory of the key-value cache, such as 4GiB (default: what all sequences need, if it fits)."
    ),
    block_size: int = typer.Option(None, help="Tokens of a block of the key-value cache (default: 16)."),
    enable_prefix_caching: bool = typer.Option(
        None,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse what prompts begin alike with (default: on).",
    ),
    enable_chunked_prefill: bool = typer.Option(
        None,
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Compute long prompts in pieces, beside answers in progress (default: on).",
    ),
    num_speculative_tokens: int = typer.Option(
        None, help="Guess so many tokens at most by prompt lookup, where it pays (default: 0, off)."
    ),
    batch: str = typer.Option(
        None, help="Dynamic batching, as JSON with min_size, max_size, max_latency_ms, strategy (default: what fits)."
    ),
    deterministic: bool = typer.Option(
        None,
        "--deterministic",
        help="The same tokens whatever else is in the batch or the cache; slower (default: off).",
    ),
    check_blocks: bool = typer.Option(
        None, "--check-blocks", help="Verify the cache's bookkeeping after every step (default: off)."
    ),
    seed: int = typer.Option(
        None, help="Makes requests that carry no seed repeatable, in their order (default: a fresh one each time)."
    ),
    tensor_parallel_size: int = typer.Option(
        None, "--tensor-parallel-size", "-tp", help="Ranks that share each layer (default: 1)."
    ),
    pipeline_parallel_size: int = typer.Option(
        None, "--pipeline-parallel-size", "-pp", help="Stages that share the layers (default: 1)."
    ),
    data_parallel_size: int = typer.Option(
        None,
        "--data-parallel-size",
        "-dp",
        help="Engines, each with the whole model; prompts follow their prefix (default: 1).",
    ),
    nnodes: int = typer.Option(None, help="Machines that the ranks of one engine are spread over (default: 1)."),
    node_rank: int = typer.Option(
        None, help="Which of them this is; only node 0 serves, the others join it (default: 0)."
    ),
    master_addr: str = typer.Option(None, help="Node 0's address (default: 127.0.0.1)."),
    master_port: int = typer.Option(None, help="A free port of node 0, the same on each node (default: none)."),
    worker_timeout: float = typer.Option(
        None, help="Seconds that a rank waits for another within a step before that counts as hanging (default: 60)."
    ),
    tool_call_parser: str = typer.Option(
        None, help="How the model writes tool calls: hermes, llama3, mistral, json or auto (default: auto)."
    ),
    reasoning_parser: str = typer.Option(
        None, help="How the model marks its reasoning: think, mistral, none or auto (default: auto)."
    ),
    weight_version: str = typer.Option(None, help="What answers call the weights (default: a name by their content)."),
    enable_lora: bool = typer.Option(
        None, "--enable-lora", help="Set memory aside for adapters at the start (default: off)."
    ),
    lora_modules: list[str] = typer.Option(
        [], help="An adapter to begin with, as NAME=FOLDER of a PEFT adapter; repeat it for more (default: none)."
    ),
    max_loras: int = typer.Option(None, help="Adapters that are loaded at once (default: 8)."),
    max_lora_rank: int = typer.Option(None, help="The largest rank of an adapter (default: 64)."),
    trust_remote_code: bool = typer.Option(
        None, "--trust-remote-code", help="Accepted; no remote code is ever run (default: off)."
    ),
    shutdown_timeout: float = typer.Option(
        None, help="Seconds that running requests get to finish at the end (default: 30)."
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
