"""What the server counts, for Prometheus.

Where vLLM has a metric, ours means the same and has its name, with `treadle_` in the place of `vllm:`. What an engine
counted has the label `engine` (the number of the replica); what clients saw of the server has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from treadle.serve.interface import EngineInterface
from treadle.serve.request import Delta, FinishReason
from treadle.serve.stats import TOKENS_BOUNDS, Distribution, EngineStats
from treadle.serve.step_budget import Cause

disable_created_metrics()  # a second series beside each that tells only when the server started

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)

# Name, help, and how an engine's numbers give the value.
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("treadle_prompt_tokens", "Tokens of the prompts that were computed.", lambda s: s.prompt_tokens),
    ("treadle_generation_tokens", "Tokens that were generated.", lambda s: s.generated_tokens),
    ("treadle_prefix_cache_queries", "Tokens of prompts looked for in the cache.", lambda s: s.looked_up_tokens),
    ("treadle_prefix_cache_hits", "Tokens of prompts found in the cache.", lambda s: s.cached_tokens),
    ("treadle_prefix_cache_evictions", "Blocks of prefixes that had to make room.", lambda s: s.evictions),
    (
        "treadle_num_preemptions",
        "Sequences that were put back into the queue, for want of blocks or by priority.",
        lambda s: s.preemptions,
    ),
    ("treadle_spec_decode_num_draft_tokens", "Tokens that were guessed ahead.", lambda s: s.drafted_tokens),
    ("treadle_spec_decode_num_accepted_tokens", "Guessed tokens that held.", lambda s: s.accepted_tokens),
    ("treadle_requests", "Sequences handed to the engine.", lambda s: s.requests),
    ("treadle_steps", "Steps that the engine ran.", lambda s: s.steps),
    ("treadle_model_seconds", "Seconds of its steps that the engine spent in the model.", lambda s: s.model_seconds),
)
GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("treadle_num_requests_running", "Sequences that are running.", lambda s: s.running),
    ("treadle_num_requests_waiting", "Sequences that wait to run.", lambda s: s.waiting),
    (
        "treadle_kv_cache_usage_perc",
        "Share of the key-value cache's blocks that sequences hold; 1 means all of them.",
        lambda s: s.blocks_held / s.blocks if s.blocks else 0.0,
    ),
    ("treadle_kv_blocks", "Blocks of the key-value cache.", lambda s: s.blocks),
    ("treadle_kv_blocks_held", "Blocks of the key-value cache that sequences hold.", lambda s: s.blocks_held),
    ("treadle_step_budget_tokens", "Tokens that the last step was allowed to hold.", lambda s: s.budget_tokens),
    ("treadle_step_budget_sequences", "Sequences that the last step was allowed to run.", lambda s: s.budget_seqs),
    ("treadle_engine_asleep", "Whether the engine gave its memory back and waits to be woken.", lambda s: s.asleep),
)
DISTRIBUTIONS: tuple[tuple[str, str, Callable[[EngineStats], Distribution]], ...] = (
    ("treadle_iteration_tokens_total", "Tokens that a step computed.", lambda s: s.steps_by_tokens),
    ("treadle_step_sequences", "Sequences that a step computed tokens of.", lambda s: s.steps_by_seqs),
    ("treadle_step_seconds", "Seconds that a step took.", lambda s: s.steps_by_seconds),
)


class ServerMetrics:
    """The server's own registry: the engine's counters as they stand, and the times that clients saw."""

    def __init__(self, engine: EngineInterface, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        self._model_name = model_name
        self.responses = Counter(
            "treadle_http_responses", "HTTP answers by path and status.", ["path", "status"], registry=self.registry
        )
        self.first_token = self._histogram(
            "treadle_time_to_first_token_seconds", "Seconds from a sequence's arrival to its first token.", SECONDS
        )
        self.next_token = self._histogram(
            "treadle_inter_token_latency_seconds", "Seconds between two tokens of a sequence.", TOKEN_SECONDS
        )
        self.whole = self._histogram(
            "treadle_e2e_request_latency_seconds", "Seconds from a sequence's arrival to its last token.", SECONDS
        )
        self.queue = self._histogram(
            "treadle_request_queue_time_seconds", "Seconds that a sequence waited before it first ran.", SECONDS
        )
        self.prompt = self._histogram("treadle_request_prompt_tokens", "Tokens of a sequence's prompt.", TOKENS_BOUNDS)
        self.generation = self._histogram(
            "treadle_request_generation_tokens", "Tokens that a sequence generated.", TOKENS_BOUNDS
        )

    def _histogram(self, name: str, text: str, bounds: Iterable[float]) -> Histogram:
        made = Histogram(name, text, ["model_name"], buckets=tuple(bounds), registry=self.registry)
        return made.labels(self._model_name)

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def watch(self) -> RequestClock:
        """Return what notes the times of a request."""
        return RequestClock(self)


class RequestClock:
    """Notes the times of one HTTP request's deltas."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.last: dict[int, float] = {}  # when the last token of each choice came

    def see(self, delta: Delta, seconds: float) -> None:
        """Count a delta that came so many seconds after the request was handed to the engine."""
        metrics = self.metrics
        if delta.tokens:
            if delta.index in self.last:
                metrics.next_token.observe(seconds - self.last[delta.index])
            else:
                metrics.first_token.observe(seconds)
                metrics.queue.observe(delta.queue_seconds)
            self.last[delta.index] = seconds
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.whole.observe(seconds)
            metrics.prompt.observe(delta.prompt_tokens)
            metrics.generation.observe(delta.completion_tokens)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineInterface, model_name: str) -> None:
        self.engine, self.model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        stats = list(self.engine.engine_stats)
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text, value in table:
                family = kind(name, text, labels=["model_name", "engine"])
                for labels, one in self._labelled(stats):
                    family.add_metric(labels, value(one))
                yield family
        for name, text, value in DISTRIBUTIONS:
            family = HistogramMetricFamily(name, text, labels=["model_name", "engine"])
            for labels, one in self._labelled(stats):
                found = value(one)
                family.add_metric(labels, _buckets(found), found.total)
            yield family
        yield self._finished(stats)
        yield self._budgets(stats)
        yield from self._of_the_server()

    def _labelled(self, stats: list[EngineStats]) -> Iterator[tuple[list[str], EngineStats]]:
        for number, one in enumerate(stats):
            yield [self.model_name, str(number)], one

    def _finished(self, stats: list[EngineStats]) -> Metric:
        labels = ["model_name", "engine", "finished_reason"]
        family = CounterMetricFamily(
            "treadle_request_success", "Sequences that ended, by finished_reason.", labels=labels
        )
        for place, one in self._labelled(stats):
            for reason in FinishReason:
                family.add_metric([*place, reason.value], one.finished.get(reason.value, 0))
        return family

    def _budgets(self, stats: list[EngineStats]) -> Metric:
        text = "Steps by what their size was decided by; `bound` means that more would have taken too long."
        family = CounterMetricFamily("treadle_step_budgets", text, labels=["model_name", "engine", "cause"])
        for place, one in self._labelled(stats):
            for cause in Cause:
                family.add_metric([*place, cause.value], one.budget_causes.get(cause.value, 0))
        return family

    def _of_the_server(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "treadle_engine_healthy", "Whether the engine makes its steps, as /health says.", labels=["model_name"]
        )
        healthy.add_metric([self.model_name], float(not self.engine.unhealthy))
        yield healthy
        cache = GaugeMetricFamily(
            "treadle_kv_cache_tokens", "Tokens that an engine's key-value cache can hold.", labels=["model_name"]
        )
        cache.add_metric([self.model_name], self.engine.capacity.tokens)
        yield cache
        labels = {"model_name": self.model_name, "weight_version": self.engine.weight_version}
        info = GaugeMetricFamily("treadle_info", "What is served: always 1, the labels tell.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info


def _buckets(found: Distribution) -> list[Any]:
    """Return the counts as Prometheus has them: of all numbers up to each bound."""
    counts = list(found.counts)
    edges = [*(floatToGoString(bound) for bound in found.bounds), "+Inf"]
    return [[edge, sum(counts[: place + 1])] for place, edge in enumerate(edges)]
