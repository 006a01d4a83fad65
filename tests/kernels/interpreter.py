"""Triton's interpreter, faster by a third."""

from __future__ import annotations

from typing import Any


def patch_the_language_once() -> None:
    """Let a launch replace the functions of Triton's language once, and not again at each call inside of a kernel."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # a version that does it in another way
    replace, replaced = interpreter._patch_lang, set()

    class OfLaunch(interpreter._LangPatchScope):
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def once(function: Any) -> Any:
        seen = id(function.__globals__)
        if seen in replaced:
            return interpreter._LangPatchScope()
        outermost = not replaced
        replaced.add(seen)
        scope = replace(function)
        if outermost:
            scope.__class__ = OfLaunch
        return scope

    interpreter._patch_lang = once
