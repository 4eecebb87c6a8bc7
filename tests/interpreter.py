"""Triton's interpreter without what it does again for every call of a function in a kernel."""

from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Have a launch replace the language's functions once for all functions of a module that it calls.

    The interpreter does so at each call, one or two milliseconds that are most of what a small kernel takes. What it
    replaces stays replaced until the launch ends.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set()

    def patch_new(function):
        module = function.__globals__["__name__"]
        if module not in done:
            done.add(module)
            return patch(function)

    def launch_anew(*args, **kwargs):
        done.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew
