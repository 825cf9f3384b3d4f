"""dicp: a torch.compile backend compiler with vendor code generation."""

from __future__ import annotations

from typing import Any

from dicp.version import VERSION as __version__

__all__ = ["Backend", "__version__", "explain"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for: `import dicp` alone costs nothing."""
    if name == "explain":
        from dicp.explain import explain

        return explain
    if name == "Backend":
        from dicp.dynamo_bridge.backend import Backend

        return Backend
    raise AttributeError(f"module 'dicp' has no attribute {name!r}")
