"""Prometheus metrics of one server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine, Job
from .prompts import PromptReader


class Metrics:
    def __init__(self, engine: Engine, reader: PromptReader):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("kimi_k3_requests", "requests by outcome", ["outcome"], registry=registry)
        self.prompt = Counter("kimi_k3_prompt_tokens", "tokens of prompts", registry=registry)
        self.cached = Counter("kimi_k3_cached_tokens", "of those, found in the prefix cache", registry=registry)
        self.new = Counter("kimi_k3_generated_tokens", "new tokens", registry=registry)
        self.first = Histogram("kimi_k3_first_token_seconds", "from arrival to the first token", registry=registry)
        batches, cache = engine.batches, engine.batches.prefixes.cache
        gauges = {
            "waiting_requests": (
                "texts that wait to begin, and prompts to be read",
                lambda: reader.waiting + batches.waiting_requests,
            ),
            "running_requests": ("texts that hold a slot", lambda: batches.pool.sequences - batches.pool.free_slots),
            "free_slots": ("texts that could run beside them", lambda: batches.pool.free_slots),
            "free_pages": ("of the latents' memory", lambda: batches.pool.free_pages),
        }
        for name, (about, value) in gauges.items():
            Gauge(f"kimi_k3_{name}", about, registry=registry).set_function(value)
        kept = Gauge("kimi_k3_prefix_cache_bytes", "bytes of kept prefixes", ["tier"], registry=registry)
        for tier in cache.tiers:
            kept.labels(tier.name).set_function(lambda tier=tier: tier.used)

    def count(self, prompts: list[list[Job]], outcome: str) -> None:
        """A request has ended, which asked for these texts behind each of its prompts."""
        self.requests.labels(outcome).inc()
        for jobs in prompts:
            self.prompt.inc(len(jobs[0].ids))
            self.cached.inc(jobs[0].request.cached)
            for job in jobs:
                self.new.inc(job.tokens)
                if job.first is not None:
                    self.first.observe(job.first - job.started)

    def text(self) -> bytes:
        return generate_latest(self.registry)
