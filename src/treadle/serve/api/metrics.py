"""What the server counts, for Prometheus: names begin with treadle_, units are in the names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from treadle.serve.interface import EngineInterface
from treadle.serve.request import Delta

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """The server's own registry: the engine's counters as they stand, and the times that clients saw."""

    def __init__(self, engine: EngineInterface) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self.responses = Counter(
            "treadle_http_responses", "HTTP answers by path and status.", ["path", "status"], registry=self.registry
        )
        self.first_token = self._seconds("treadle_time_to_first_token_seconds", "From a request to its first token.")
        self.next_token = self._seconds("treadle_time_per_output_token_seconds", "Between a request's tokens.")
        self.request = self._seconds("treadle_request_seconds", "From a request to its last token.")

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def watch(self) -> RequestClock:
        """Return a clock for a request that begins now."""
        return RequestClock(self)


class RequestClock:
    """Times one HTTP request's deltas."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.started = time.monotonic()
        self.last: dict[int, float] = {}

    def see(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.tokens:
            if delta.index in self.last:
                self.metrics.next_token.observe(now - self.last[delta.index])
            else:
                self.metrics.first_token.observe(now - self.started)
            self.last[delta.index] = now
        if delta.finish_reason is not None:
            self.metrics.request.observe(now - self.started)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineInterface) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, capacity = self.engine.stats, self.engine.capacity
        for name, text, value in (
            ("treadle_requests", "Sequences submitted to the engine.", stats.requests),
            ("treadle_engine_steps", "Steps that the engine ran.", stats.steps),
            ("treadle_prompt_tokens", "Tokens of prompts that were answered.", stats.prompt_tokens),
            ("treadle_cached_tokens", "Tokens of prompts that were still in the cache.", stats.cached_tokens),
            ("treadle_generated_tokens", "Tokens that were generated.", stats.generated_tokens),
        ):
            yield CounterMetricFamily(name, text, value=value)
        finished = CounterMetricFamily(
            "treadle_requests_finished", "Sequences that ended, by reason.", labels=["reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        for name, text, value in (
            ("treadle_requests_running", "Sequences that are running.", stats.running),
            ("treadle_requests_waiting", "Sequences that wait for a cache slot.", stats.waiting),
            ("treadle_kv_blocks_held", "Blocks of the key-value cache that sequences hold.", stats.blocks_held),
            ("treadle_cache_tokens", "Tokens that the key-value cache can hold.", capacity.seqs * capacity.length),
        ):
            yield GaugeMetricFamily(name, text, value=value)
