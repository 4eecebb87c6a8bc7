"""Evaluation: a recall suite over the length of the context for any causal language model, and its pictures."""

import importlib

# Imported when they are asked for: every command of `kimi-k3` imports this package, and few need its contents.
_MODULES = {
    "TASKS": "suite",
    "EndpointReader": "endpoint",
    "EvalError": "sizing",
    "Haystack": "haystack",
    "ModelReader": "reader",
    "Plan": "run",
    "Prompt": "sizing",
    "Question": "sizing",
    "Tokens": "sizing",
    "evaluate": "run",
    "open_haystack": "haystack",
    "parse_length": "run",
    "summary": "run",
}

__all__ = list(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
