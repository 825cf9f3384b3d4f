"""The vendors, a folder each."""

CHIPS_WITHOUT_TARGET = (
    "T-Head PPU 810", "Iluvatar BI-V150", "Biren BR106", "Cambricon MLU370", "Hygon K100_AI",
)  # fmt: skip
"""Chips that tables list beside those of the targets."""
