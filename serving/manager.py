"""transformers' interface of continuous batching over `BatchEngine`.

`init_continuous_batching` of a model makes a manager; `generate_batch` and `continuous_batching_context_manager` are
transformers' own and call it, and so does trl's `use_transformers_continuous_batching`. Results are transformers'
`GenerationOutput`.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from .batching import BatchEngine, EngineFull
from .sampling import Choice, Sampler, Sampling
from .scheduler import Request

logger = logging.getLogger(__name__)
PAGE = 64
# Settings of generation that say how a token is chosen, and that `Sampling` has under the same names.
RULES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
# Those that change the tokens in a way that a batch of independent texts has no place for, with what asks for nothing.
REFUSED = {
    "num_beams": 1, "penalty_alpha": None, "assistant_early_exit": None, "prompt_lookup_num_tokens": None,
    "no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "guidance_scale": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "constraints": None, "force_words_ids": None,
    "stop_strings": None, "min_length": 0, "exponential_decay_length_penalty": None, "watermarking_config": None,
    "top_h": None, "encoder_repetition_penalty": 1.0,
}  # fmt: skip


class KimiK3BatchingManager(ContinuousBatchingManager):
    """transformers' manager, whose requests run in a `BatchEngine`.

    Args:
        model: in evaluation from here on.
        generation_config: lengths, end tokens and the rule of every request.
        continuous_batching_config: `max_requests_per_batch` (64), `max_batch_tokens` (2,048), `cpu_offload_space`,
            `max_queue_size`, `return_logprobs`, `seed`, and the memory: `num_blocks` pages of `page_size` tokens, or
            what `workload_hints` need, and on a GPU at most `max_memory_percent` of what is free (80 %).
            Log-probabilities are those of the model's own logits. The other settings belong to attention with keys and
            values, and have nothing to say here.
        workload_hints: lengths and number of the requests to come.

    Raises:
        ValueError: for a setting of generation that is not supported, by name.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ):
        self.model, self.generation_config = model.eval(), generation_config
        self.continuous_batching_config = continuous_batching_config
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self.rules = _rules(generation_config)
        self.engine = BatchEngine(model, **_sizes(model, continuous_batching_config, workload_hints))
        # What the inherited methods read: results on their way to whoever waits for them, and names of requests.
        self.output_router, self.background_thread_status = OutputRouter(), BackgroundThreadStatus()
        self._request_counter, self._request_lock, self._use_prefix_sharing = 0, threading.Lock(), False
        self._generation_thread: threading.Thread | None = None
        self.warmed_up, self.is_tp_driver = True, True
        self._requests: dict[str, Request] = {}
        seed = continuous_batching_config.seed
        self._seed, self._drawn = int(torch.randint(2**62, ())) if seed is None else seed, itertools.count()

    # --- running -------------------------------------------------------------------------------------------------

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing: the attention of a batch is ours whatever implementation is set."""

    def warmup(self) -> None:
        """Nothing yet: no graphs are captured."""

    def start(self) -> None:
        if self.is_running():
            return
        self.background_thread_status.clear()
        self._generation_thread = self.engine.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """As in transformers: requests at hand end first, unless `hard_stop`. Without `block` a thread waits for it,
        and behind `timeout` seconds nobody does."""
        if self._generation_thread is None:
            return
        stop = functools.partial(self.engine.stop, 0 if hard_stop else timeout, abort=hard_stop)
        if block:
            stop()
            if self._generation_thread.is_alive():
                logger.warning(f"requests are still running after {timeout} seconds: they end in their thread")
            self._generation_thread = None
        else:
            threading.Thread(target=stop, daemon=True).start()
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """As in transformers."""
        self.stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """As in transformers: inside, no step runs, and the model may be changed; requests go on behind it."""
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        with self.engine.paused():
            yield

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **rules: Any,
    ) -> str | None:
        """As in transformers; `rules` are settings of this request's sampling (`temperature`, `top_k`, `top_p`, ...).

        A request that cannot run is answered with an output that has failed, and says why.
        """
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        limit = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit is None:  # as many as there is room for
            positions = self.model.config.get_text_config(decoder=True).max_position_embeddings
            limit = max(min(self.engine.pool.pages * self.engine.pool.page, positions) - len(input_ids), 1)
        ends = _ends(self.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
        names = [f"{request_id}__child#{i}" for i in range(self.num_return_sequences - 1)] + [request_id]
        outputs = [
            GenerationOutput(name, list(input_ids), timestamps=[] if record_timestamps else None) for name in names
        ]
        try:
            first, *siblings = (self._request(output, limit, ends, streaming, rules) for output in outputs)
            first.siblings = siblings
            self._requests |= zip(names, (first, *siblings), strict=True)
            self.engine.submit(first)
        except (ValueError, TypeError, EngineFull) as error:
            for output in outputs:
                self._requests.pop(output.request_id, None)
                output.error, output.status = str(error), RequestStatus.FAILED
                self.output_router.deliver(output)
        return request_id

    def _request(
        self, output: GenerationOutput, limit: int, ends: frozenset[int], streaming: bool, rules: dict
    ) -> Request:
        reported = 0 if self.continuous_batching_config.return_logprobs else None
        drawn = hashlib.blake2b(f"{self._seed} {next(self._drawn)}".encode(), digest_size=8).digest()
        given = {"log_probabilities": reported, "seed": int.from_bytes(drawn, "big"), **rules}
        sampling = Sampling(**{**self.rules, **given})
        request = Request(output.prompt_ids, limit, Sampler(sampling, output.prompt_ids, ends), ends)
        started = output.created_time

        def take(choice: Choice) -> None:
            nonlocal started
            if not output.generated_tokens:
                started, output.status = time.perf_counter(), RequestStatus.DECODING
            output.generated_tokens.append(choice.token)
            if choice.log_probability is not None:
                output.logprobs.append(choice.log_probability)
            if output.timestamps is not None:
                output.timestamps.append(time.perf_counter())
            if streaming:
                self.output_router.deliver(_copy(output))

        def done(request: Request) -> None:
            self._requests.pop(output.request_id, None)
            if request.finish == "cancelled":  # as in transformers, nobody hears of it
                return
            output.status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
            output.error = None if request.error is None else str(request.error)
            output.lifespan = started, time.perf_counter()
            self.output_router.deliver(_copy(output))

        request.take, request.done = take, done
        return request

    def cancel_request(self, request_id: str) -> None:
        """As in transformers; before a prompt is read, all answers to it."""
        if (request := self._requests.get(request_id)) is not None:
            for each in (request, *request.siblings):
                self.engine.cancel(each)


def _copy(output: GenerationOutput) -> GenerationOutput:
    """What a listener keeps, which later tokens do not change."""
    lists = {"generated_tokens": output.generated_tokens[:], "logprobs": output.logprobs[:]}
    timestamps = None if output.timestamps is None else output.timestamps[:]
    return GenerationOutput(**{**output.__dict__, **lists, "timestamps": timestamps})


def _ends(tokens: int | list[int] | None) -> frozenset[int]:
    tokens = [tokens] if isinstance(tokens, int) else tokens or []
    return frozenset(token for token in map(int, tokens) if token >= 0)


def _rules(config: GenerationConfig) -> dict[str, Any]:
    """The part of a generation config that `Sampling` takes."""
    for name, neutral in REFUSED.items():
        if (value := getattr(config, name, None)) not in (None, neutral):
            raise ValueError(f"{name}={value!r} is not supported where many requests run at once: use model.generate")
    rules: dict[str, Any] = {"temperature": 1.0}
    rules |= {name: value for name in RULES if (value := getattr(config, name, None)) is not None}
    if not config.do_sample:
        rules = {name: rules[name] for name in ("repetition_penalty", "min_new_tokens") if name in rules}
        rules["temperature"] = 0
    return rules


def _sizes(model: Any, config: Any, hints: Any) -> dict[str, Any]:
    """Arguments of `BatchEngine`."""
    sequences = config.max_requests_per_batch or 64
    sizes: dict[str, Any] = {"sequences": sequences, "page": PAGE}
    if config.max_batch_tokens:
        sizes["step_tokens"] = config.max_batch_tokens
    sizes["host_bytes"] = int((config.cpu_offload_space or 0) * 2**30)
    sizes["waiting"] = config.max_queue_size or None
    if config.num_blocks:
        sizes |= {"page": config.page_size, "tokens": config.num_blocks * config.page_size}
    elif hints is not None and hints.num_requests:
        sizes["sequences"] = sequences = min(sequences, hints.num_requests)
        longest = hints.max_prompt_length + (hints.max_generated_length or 1024)
        sizes["tokens"] = sequences * -(-longest // PAGE) * PAGE
    if model.device.type == "cuda":
        sizes["memory"] = int((config.max_memory_percent or 0.8) * torch.cuda.mem_get_info(model.device)[0])
    return sizes
