"""The registry of methods; each method's file adds itself."""

from __future__ import annotations

from fedtail.core.registry import Registry
from fedtail.methods.base import Method

METHODS: Registry[Method] = Registry("method")
