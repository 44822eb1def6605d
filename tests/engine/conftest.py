"""Engines in these tests run for seconds, and would be compiled for longer."""

from tests.quick_compilation import quickly_compiled_programs

__all__ = ["quickly_compiled_programs"]
