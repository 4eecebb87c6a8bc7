"""Adapters without an import that a user would have to know of: peft learns of Kimi K3 at its own import.

`lora_kimi_k3.py` needs peft and says what it learns; this file is imported with the model and needs nothing.
"""

import importlib
import importlib.abc
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


class _PeftFinder(importlib.abc.MetaPathFinder):
    """Finds peft as the other finders do, and calls `teach` behind its import."""

    def __init__(self) -> None:
        self._asking = threading.local()  # of a thread: another one's import must find peft here meanwhile

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft" or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.others = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                teach()
            except Exception as error:  # of a release that we do not know: others use peft as well
                logger.warning("adapters of Kimi K3 do not work with this release of peft: %s", error)

        loader.exec_module = exec_module  # of this import alone: every search makes a loader
        return spec


def teach() -> None:
    """Say to peft, which is imported, what it must know of our models."""
    importlib.import_module(".lora_kimi_k3", __package__)  # which does it, and may be what imports peft


def teach_peft_when_imported() -> None:
    """Now, or as soon as somebody imports it; importing it takes seconds, and most processes have no adapters."""
    if sys.modules.get("peft") is not None:
        teach()
    else:
        sys.meta_path.insert(0, _PeftFinder())
